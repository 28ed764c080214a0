"""The league: policies that are trained at the same time, and play against each other's past.

Matches end and players are trained (`events`), and the league says who plays whom, who is copied,
who begins anew and who goes (`league.League`). It does no input or output. What a league is like is
decided by its builder (`builder.LeagueBuilder`); the shipped ones are in `config.BUILDERS`, and the
keys in `config.LeagueConfig`.

    league = League(LeagueConfig(builder="alphastar"), agents=("row", "column"), seed=0)
    commands = league.begin()  # add three mains, three main exploiters, ...; freeze the mains
    ...  # `PlayerReady` for each of them
    (line_up,) = league.book(MatchRequested())
    league.book(MatchFinished(line_up.match_id, line_up.attempt, {"row": 1, "column": -1}, 1))
    league.book(StepsTrained("main-0", 1000))
    commands = league.build()

The words of RLlib's AlphaStar, and those used here:

    LeagueBuilder.build_league(result)         LeagueBuilder.build(results), which returns commands
    policy_mapping_fn                          LeagueBuilder.match(results), once for all agents
    AlphaStarLeagueBuilder                     builder = "rllib"
    NoLeagueBuilder                            builder = "none"
    trainable / non-trainable policies         players that learn / are frozen
    snapshot                                   Freeze, a player with the role "historical"
    num_random_policies                        random_players
    num_learning_league_exploiters             league_exploiters
    num_learning_main_exploiters               main_exploiters
    win_rate_threshold_for_new_snapshot        snapshot_at
    keep_new_snapshot_training_prob            keep_training_probability
    prob_league_exploiter_match                league_exploiter_probability
    prob_main_exploiter_match                  main_exploiter_probability
    prob_main_exploiter_playing_against_learning_main    learning_main_probability
    max_num_policies_to_train                  max_learning
    win_rates                                  Payoffs.win_rate, of each pair of players
"""
