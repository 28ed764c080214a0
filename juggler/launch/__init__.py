"""Runs whose processes are started on several hosts by an engine that is there: SSH, Slurm or a
Docker Swarm."""
