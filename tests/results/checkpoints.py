"""Small checkpoints for tests: every kind of tensor, and the entries of a record that all of them have."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uneven.files import partial_folder
from uneven.results.checkpoint import RankPart, Whole, seal, write_rank_part

RECORD: dict[str, Any] = {
    "slot": 4,
    "samples": 32,
    "dataset_samples": 64,
    "finished": False,
    "stopped": None,
    "best": None,
    "params": ["layer.weight", "layer.bias"],
    "buffers": ["norm.mean"],
    "tied": {"head.weight": "layer.weight"},
    "param_groups": [{"lr": 0.1, "params": ["layer.weight", "layer.bias"]}],
    "history": [{"epoch": 1, "step": 4, "loss": 0.5}],
    "dropped": [],
    "skipped": [],
    "config": {"devices": "cpu,cpu@0.4", "policy": "balanced", "batch_size": 8},
    "devices": ["cpu", "cpu@0.4"],
    "structure": None,
    "ledger": {"trained": 4, "next": 4, "gaps": []},
    "cause": "interval",
}


# As results/state_tree.py leaves it: a tensor's name in place of it, and numbers as they are.
OPTIMIZER = {
    "state": {
        "layer.weight": {"exp_avg": {"#": "tensor", "name": "optimizer.layer.weight.exp_avg"}, "count": 3},
    }
}


def make_whole(slot: int = 4, best: bool = False, **changes: Any) -> Whole:
    tensors = {
        "layer.weight": torch.arange(6.0).view(2, 3) + slot,
        "layer.bias": torch.ones(2),
        "norm.mean": torch.zeros(2),
    }
    return Whole(
        tensors, {**deepcopy(RECORD), "slot": slot, **changes}, {"layer.weight": torch.ones(2, 3)} if best else None
    )


def make_part(rank: int) -> RankPart:
    tensors: dict[str, Tensor] = {
        "optimizer.layer.weight.exp_avg": torch.full((2, 3), float(rank)),
        "optimizer.layer.weight.step": torch.tensor(4.0),
        "random.cpu": torch.get_rng_state(),
        "user.bag": torch.tensor([rank]),
    }
    return RankPart(
        tensors, {"log": [[slot, rank * 4, 4] for slot in range(4)], "optimizer": OPTIMIZER, "user": f"rank {rank}"}
    )


def write_checkpoint(folder: Path, slot: int = 4, ranks: int = 2, best: bool = False, **changes: Any) -> Path:
    partial = partial_folder(folder, "test")
    for rank in range(ranks):
        write_rank_part(partial, rank, make_part(rank))
    seal(partial, folder, ranks, make_whole(slot, best, **changes))
    return folder


def flip_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
