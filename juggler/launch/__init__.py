"""Runs whose processes SSH, Slurm, Docker Swarm or Kubernetes start on hosts."""
