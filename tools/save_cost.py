"""What a checkpoint costs: a model of 25 M params on two CPU ranks, saved while it trains.

    python tools/save_cost.py [--policy sync|cadence ...] [--steps 60] [--every 12]

Prints, for each policy and rank: how long a save takes until its folder is whole, which part of that the training
thread spends in state "checkpoint", and the time of a step while a save is under way beside that of the others.
"""

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import uneven
from uneven import Callback, CallbackInfo, TensorData

WIDTHS = (1024, 4096, 4096, 1024)  # 25.2 M params


def make_model() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch), batch)


class Watch(Callback):
    """Notes when each step ended, and whether a checkpoint was being written then."""

    def __init__(self, out: Path, notes: Path) -> None:
        self.out, self.notes = out, notes
        self.steps: list[tuple[float, bool]] = []

    def on_step(self, info: CallbackInfo) -> None:
        del info
        is_saving = any(path.name.startswith(".step") for path in self.out.iterdir())
        self.steps.append((time.perf_counter(), is_saving))

    def on_end(self, info: CallbackInfo) -> None:
        (self.notes / f"{info.rank}.json").write_text(json.dumps(self.steps))


def measure(policy: str, steps: int, every: int) -> None:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        out, notes = Path(folder) / "run", Path(folder)
        data = TensorData(torch.randn(steps * 32, WIDTHS[0], generator=torch.Generator().manual_seed(0)))
        state = uneven.fit(
            model=make_model,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
            step=step,
            dataset=data,
            batch_size=16,
            epochs=1,
            devices="cpu,cpu",
            policy=policy,
            shares=(1, 1) if policy == "cadence" else None,
            save_every=f"{every if policy == 'sync' else 2 * every} steps",
            out=out,
            progress="off",
            callbacks=[Watch(out, notes)],
        )
        assert state.timeline is not None
        size = sum(path.stat().st_size for path in max(out.glob("step-*"), key=lambda p: p.stat().st_mtime).iterdir())
        for rank, account in enumerate(state.timeline.accounts):
            times = [(end, saving) for end, saving in json.loads((notes / f"{rank}.json").read_text())]
            lengths = [(end - begin, saving) for (begin, _), (end, saving) in pairwise(times)]
            busy_s = sum(length for length, saving in lengths if saving)
            thread_s = account.seconds["checkpoint"]
            during = statistics.median([length for length, saving in lengths if saving] or [float("nan")])
            beside = statistics.median([length for length, saving in lengths if not saving])
            print(
                f"{policy} rank {rank}: {len(state.saves)} saves of {size / 1e6:.0f} MB, {busy_s:.2f} s in all; the "
                f"training thread spent {thread_s:.3f} s in checkpoint ({100 * thread_s / busy_s:.1f} %); a step takes "
                f"{1e3 * during:.0f} ms while saving, {1e3 * beside:.0f} ms otherwise (x{during / beside:.2f})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", default=["sync", "cadence"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=12)
    args = parser.parse_args()
    for policy in args.policy:
        measure(policy, args.steps, args.every)


if __name__ == "__main__":
    main()
