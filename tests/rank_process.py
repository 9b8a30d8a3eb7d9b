"""One rank as a process: `python -m tests.rank_process PORT RANK SIZE MODULE:FUNCTION RESULT BACKEND MACHINES`.

Backend 'nccl' puts all ranks on one GPU. See tests/ranks.py.
"""

import importlib
import os
import sys

import torch

from uneven.comm.form import form_group
from uneven.comm.store import reach_store


def main(port: str, rank: str, size: str, what: str, result: str, backend: str, machines: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    store = reach_store("127.0.0.1", int(port))
    places = [int(machine) for machine in machines.split(",")]
    group = form_group(store, int(rank), int(size), device, backend, is_crowded=True, machines=places)
    module, function = what.split(":")
    found = getattr(importlib.import_module(module), function)(group)
    torch.save(found, result)
    group.all_reduce(torch.zeros(1)).wait()  # nobody leaves while another still sends
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 may abort when the interpreter ends with a group


if __name__ == "__main__":
    main(*sys.argv[1:])
