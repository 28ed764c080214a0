from support.scripted_runs import scripted_runs as scripted_runs
