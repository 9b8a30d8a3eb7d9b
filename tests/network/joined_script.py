"""The script that tests/network/test_join.py trains on several machines: three policies, the results in files.

`python joined_script.py FOLDER [EPOCHS]`. Each rank writes what it holds in the end to FOLDER/PID.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from uneven import TrainedState, fit

SAMPLES, BATCH, RANKS, EPOCHS = 96, 4, 4, 2


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[number], self.inputs[number].sin().sum().reshape(1)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(policy: str, batch_size: int = BATCH, epochs: int = EPOCHS) -> TrainedState:
    return fit(
        model=make_model, optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), step=step,
        dataset=Points(), policy=policy, batch_size=batch_size, epochs=epochs, seed=3,
    )  # fmt: skip


def main() -> None:
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else EPOCHS
    found = {}
    for policy in ("balanced", "cadence", "async"):
        state = train(policy, epochs=epochs)
        found[policy] = {
            "params": {name: value.tolist() for name, value in state.params.items()},
            "samples": sorted(part for log in state.log for part in log),
            "hosts": sorted({lane.device for lane in state.timeline.lanes}) if state.timeline else [],
        }
    (folder / f"{os.getpid()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
