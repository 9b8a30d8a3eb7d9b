"""Ranks that torchrun, Slurm, Kubernetes or Ray have started: how they find and watch each other."""
