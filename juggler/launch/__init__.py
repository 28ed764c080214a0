"""Launches runs on several hosts, by SSH, Slurm, Docker Swarm or Kubernetes."""
