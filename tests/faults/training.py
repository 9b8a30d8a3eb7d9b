"""The run of a storm's case, in a process of its own; its ranks write what they do to files that outlive them.

Started by one_run.py in a folder with case.json. Every rank appends lines to rank-PID: time, a letter, numbers. The
letters: b (a batch was given to the step), p (a slot is trained), r (a round is merged), e (evaluated), v (saved), z
(the end, with a checksum of params and buffers). What a killed rank wrote stays.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tests.faults.cases import BATCH, SILENT_S, Case
from uneven import Callback, TensorData, fit
from uneven.launch import deadlines

DUMP = signal.SIGUSR2  # prints the stacks of all threads to stack-PID
_own: dict[str, Any] = {"file": None, "trains": False}  # of this process


def note(folder: Path, letter: str, *numbers: int) -> None:
    if _own["file"] is None:
        _own["file"] = os.open(folder / f"rank-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # In one write: a line is there as a whole or not at all.
    os.write(_own["file"], (" ".join([f"{time.time():.6f}", letter, *map(str, numbers)]) + "\n").encode())


def dump_when_asked(folder: Path) -> None:
    _own["stacks"] = (folder / f"stack-{os.getpid()}").open("w")  # kept open for as long as a signal may come
    faulthandler.register(DUMP, file=_own["stacks"], all_threads=True)


class Rows(nn.Module):
    """One param per sample, to which the sample adds the factor of its slot: the params say what was trained."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        return -self.rows[ids]


def factor(slot: int) -> float:
    """Of the learning rate, different for neighbouring slots: an orphan is trained at the rate of its own."""
    return 1.0 + slot % 8 / 8.0


def make_data(case: Case) -> TensorData:
    if case.model == "rows":
        return TensorData(torch.arange(case.samples), torch.zeros(case.samples))
    generator = torch.Generator().manual_seed(case.seed)
    x = torch.randn(case.samples, 6, generator=generator, dtype=torch.float64)
    return TensorData(x, torch.randint(0, 3, (case.samples,), generator=generator))


def make_net(case: Case) -> nn.Module:
    if case.model == "rows":
        return Rows(case.samples)
    torch.manual_seed(case.seed + 1)
    middle = {"mlp": [], "norm": [nn.BatchNorm1d(16)], "dropout": [nn.Dropout(0.2)]}[case.model]
    # A bias before BatchNorm has no gradient but rounding errors, which Adam makes as large as any other.
    first = nn.Linear(6, 16, bias=case.model != "norm")
    return nn.Sequential(first, *middle, nn.Tanh(), nn.Linear(16, 3)).double()


def make_optimizer(case: Case, params: Iterable[Tensor]) -> Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(params, lr=float(case.slot_size))  # the mean's divisor: a sample adds 1
    if case.optimizer == "momentum":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return torch.optim.Adam(params, lr=0.01)


def loss_of(case: Case, model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    loss: Tensor = model(x).mean() if case.model == "rows" else F.cross_entropy(model(x), y)
    return loss


class Training:
    """The functions that ranks call, with the case they belong to."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder

    def model(self) -> nn.Module:
        dump_when_asked(self.folder)
        return make_net(self.case)

    def optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        return make_optimizer(self.case, params)

    def scheduler(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, factor if self.case.model == "rows" else lambda slot: 1.0)

    def step(self, model: nn.Module, batch: Any) -> Tensor:
        if _own["trains"]:
            note(self.folder, "b", len(batch[0]))
        time.sleep(self.case.pause_ms / 1e3)
        return loss_of(self.case, model, batch)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
        time.sleep(self.case.pause_ms / 1e3)
        return {"loss": loss_of(self.case, model, batch) * len(batch[0])}, len(batch[0])


class Notes(Callback):
    """Writes down where the rank is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_start(self, info: Any) -> None:
        _own["trains"] = True
        note(self.folder, "s", info.rank)

    def on_step(self, info: Any) -> None:
        note(self.folder, "p", info.step)

    def on_round(self, info: Any) -> None:
        note(self.folder, "r", info.step)

    def on_eval(self, info: Any) -> None:
        note(self.folder, "e", info.step)

    def on_save(self, info: Any) -> None:
        note(self.folder, "v", info.step)

    def on_end(self, info: Any) -> None:
        total = 0
        for _, tensor in sorted(info.model.state_dict().items()):
            total = zlib.crc32(tensor.contiguous().numpy().tobytes(), total)
        note(self.folder, "z", info.rank, total)


def settings_of(case: Case, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "batch_size": BATCH,
        "epochs": case.epochs,
        "devices": ",".join(case.devices),
        "policy": case.policy,
        "backend": case.backend,
        "seed": case.seed,
        "out": folder / "run",
        "progress": "lines",
    }
    if not case.is_exact:
        found |= {"anchor": case.anchor, "max_anchor": 4 * case.anchor, "lr_scale": 1.0, "verify": case.verify}
    if case.model == "norm" and case.is_exact:
        found["sync_batchnorm"] = True
    for name in ("eval_every", "save_every"):
        if (every := getattr(case, name)) is not None:
            found[name] = int(every) if every.isdecimal() else every
    return found


def main() -> None:
    """In the launcher's process."""
    folder = Path(sys.argv[1])
    case = Case.from_json(json.loads((folder / "case.json").read_text()))
    deadlines.SILENT_S = SILENT_S
    dump_when_asked(folder)
    training = Training(case, folder)
    data = make_data(case)
    fit(
        model=training.model,
        optimizer=training.optimizer,
        step=training.step,
        scheduler=training.scheduler,
        dataset=data,
        evaluate=(data, training.evaluate) if case.eval_every else None,
        callbacks=[Notes(folder)],
        **settings_of(case, folder),
    )
