"""Runs whose processes are started on several hosts by an engine that is there: SSH, Slurm, Docker
Swarm or Kubernetes."""
