"""The league: policies that train together, and play against past copies.

It books finished matches and trained steps (`commands`), draws line-ups, and has players copied,
reset and retired (`league.League`). It does no input or output. Its builder pairs players and
decides how it grows (`league_builder.LeagueBuilder`); the shipped builders are in
`builders.BUILDERS`, and the keys in `config.LeagueConfig`.

    league = League(LeagueConfig(builder="alphastar"), agents=("row", "column"), seed=0)
    commands = league.begin()  # add three mains, three main exploiters, ...; freeze the mains
    ...  # `ready` for each of them
    (line_up,) = league.request_match()
    league.finish_match(line_up.match_id, {"row": 1, "column": -1}, 1)
    league.trained("main-0", 1000)
    commands = league.build()

docs/leagues.md explains it, and has the table from the names of RLlib's AlphaStar to these.
"""
