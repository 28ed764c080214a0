"""The league: policies that are trained at the same time, and play against each other's past.

Matches end and players are trained (`events`), and the league says who plays whom, who is copied,
who begins anew and who goes (`league.League`). It does no input or output. What a league is like is
decided by its builder (`builder.LeagueBuilder`); the shipped ones are in `builders.BUILDERS`, and
the keys in `config.LeagueConfig`.

    league = League(LeagueConfig(builder="alphastar"), agents=("row", "column"), seed=0)
    commands = league.begin()  # add three mains, three main exploiters, ...; freeze the mains
    ...  # `PlayerReady` for each of them
    (line_up,) = league.book(MatchRequested())
    league.book(MatchFinished(line_up.match_id, line_up.attempt, {"row": 1, "column": -1}, 1))
    league.book(StepsTrained("main-0", 1000))
    commands = league.build()

docs/leagues.md explains it, and has the table from the names of RLlib's AlphaStar to these.
"""
