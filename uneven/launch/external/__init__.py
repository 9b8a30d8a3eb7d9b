"""Ranks that torchrun, Slurm, Kubernetes, Open MPI or Ray have started: how they find and watch each other."""
