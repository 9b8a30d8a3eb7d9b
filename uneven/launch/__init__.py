"""Who takes part in a run: it is checked, its ranks are started and watched, and what they leave is collected.

run.py is the story of `fit`, script.py that of `uneven run`. launcher.py starts rank processes (processes.py), rank.py
is what they run, training.py what every rank does, and context.py how a process learns which rank it is. The folders:
checks/ before the first step, watch/ over rank processes, nodes/ for several machines, external/ for ranks that
torchrun, Slurm, Kubernetes or Ray started, control/ for `uneven status`, `stop`, `logs` and `leave`.
"""
