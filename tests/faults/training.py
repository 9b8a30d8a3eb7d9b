"""The run of a storm's case, in a process of its own; its ranks write what they do to files that outlive them.

Started by places.py in a folder with case.json: as a launcher on one machine, as a script of `uneven run` on several.
Every rank appends lines to rank-PID: time, a letter, numbers. The letters: s (it trains: its rank, whether it came
later), g (it trains in a generation), b (a batch was given to the step), p (a slot is trained), r (a round is merged),
e (evaluated), v (saved), x (a fault that it did to itself), z (the end, with a checksum of params and buffers). What a
killed rank wrote stays. The launcher writes g, when it tells of a generation, to a file `launcher`.
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

from tests.faults.cases import BATCH, Case
from tests.faults.fault import INSIDE
from tests.faults.inside import flip_next, hold_lock
from uneven import Callback, TensorData, fit
from uneven.launch.membership import StoreMembership
from uneven.launch.watch import lost
from uneven.launch.watch.watch import Watch
from uneven.train.rank_info import Generation

DUMP = signal.SIGUSR2  # prints the stacks of all threads to stack-PID
JOIN_S, JOIN_PAUSE_S = 40.0, 0.5  # how long a run waits for who is to join, and by how much in each step
_own: dict[str, Any] = {"file": None, "trains": False, "awaits": True, "began_s": 0.0}  # of this process


def note(folder: Path, letter: str, *numbers: int, name: str = "") -> None:
    if _own["file"] is None:
        _own["file"] = os.open(folder / (name or f"rank-{os.getpid()}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # In one write: a line is there as a whole or not at all.
    os.write(_own["file"], (" ".join([f"{time.time():.6f}", letter, *map(str, numbers)]) + "\n").encode())


def note_generations(folder: Path) -> None:
    """In a launcher: when it tells the ranks of a generation; that is when a loss was detected."""
    publish = Watch._publish

    def published(self: Watch, generation: Generation) -> None:
        note(folder, "g", generation.number, name="launcher")
        publish(self, generation)

    Watch._publish = published  # type: ignore[method-assign]


def note_settled(folder: Path) -> None:
    """In a rank: when it trains in a generation."""
    settled = StoreMembership.settled

    def noted(self: StoreMembership, number: int, lines: list[str]) -> None:
        settled(self, number, lines)
        note(folder, "g", number)

    StoreMembership.settled = noted  # type: ignore[method-assign]


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
        if sys.argv[0] != "-c":  # the launcher tries the model, too
            note_settled(self.folder)
        return make_net(self.case)

    def optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        return make_optimizer(self.case, params)

    def scheduler(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, factor if self.case.model == "rows" else lambda slot: 1.0)

    def step(self, model: nn.Module, batch: Any) -> Tensor:
        if _own["trains"]:
            note(self.folder, "b", len(batch[0]))
            if self.case.kind == "join" and _own["awaits"]:
                self._await_newcomer()
        time.sleep(self.case.pause_ms / 1e3)
        return loss_of(self.case, model, batch)

    def _await_newcomer(self) -> None:
        """Slowly, until somebody has joined, or for long enough: otherwise the run is over before anybody can."""
        if not (self.folder / "awaited").exists():
            return
        _own["began_s"] = _own["began_s"] or time.monotonic()
        is_late = time.monotonic() > _own["began_s"] + JOIN_S
        _own["awaits"] = not is_late and not (self.folder / "joined").exists()
        time.sleep(JOIN_PAUSE_S if _own["awaits"] else 0.0)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
        time.sleep(self.case.pause_ms / 1e3)
        return {"loss": loss_of(self.case, model, batch) * len(batch[0])}, len(batch[0])


class Notes(Callback):
    """Writes down where the rank is, and lets happen what it does to itself."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.waiting: dict[int, float] = {}  # own faults by their place in the case, and when they are due

    def on_start(self, info: Any) -> None:
        _own["trains"] = True
        try:
            (self.folder / f"first-{info.rank}").touch(exist_ok=False)
            is_first = info.rank < len(self.case.devices)
        except FileExistsError:
            is_first = False  # one of this rank was there before
        note(self.folder, "s", info.rank, int(not is_first))
        if not is_first:
            (self.folder / "joined").touch()
            return
        own = [(place, one) for place, one in enumerate(self.case.faults) if one.kind in INSIDE]
        self.waiting = {place: fault.at for place, fault in own if fault.victim == info.rank}

    def on_step(self, info: Any) -> None:
        note(self.folder, "p", info.step)
        for place in [place for place, at in self.waiting.items() if info.step / self.case.total_slots >= at]:
            del self.waiting[place]
            fault = self.case.faults[place]
            if fault.kind == "hold":
                note(self.folder, "x", place)
                hold_lock(fault.for_s)
            else:
                flip_next(fault.how, lambda place=place: note(self.folder, "x", place))  # type: ignore[misc]

    def on_round(self, info: Any) -> None:
        note(self.folder, "r", info.step)

    def on_eval(self, info: Any) -> None:
        note(self.folder, "e", info.step)

    def on_save(self, info: Any) -> None:
        note(self.folder, "v", info.step)

    def on_end(self, info: Any) -> None:
        total = 0
        if self.case.strategy == "fsdp":  # it holds shards: ranks have different ones
            note(self.folder, "z", info.rank, total)
            return
        for _, tensor in sorted(info.model.state_dict().items()):
            total = zlib.crc32(tensor.contiguous().numpy().tobytes(), total)
        note(self.folder, "z", info.rank, total)


def run_folder(folder: Path) -> Path:
    """Where the run writes: on a disk of its own where that is to be full."""
    return folder / ("disk" if (folder / "disk").exists() else ".") / "run"


def settings_of(case: Case, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "batch_size": BATCH,
        "epochs": case.epochs,
        "policy": case.policy,
        "backend": case.backend,
        "seed": case.seed,
        "out": run_folder(folder),
        "progress": "lines",
    }
    if not case.has_network:  # else each machine's command names its own
        found |= {"devices": ",".join(case.devices), "restarts": case.restarts}
    if case.strategy is not None:
        found |= {"strategy": case.strategy, "redundancy": case.redundancy}
    if not case.is_exact:
        found |= {"anchor": case.anchor, "max_anchor": 4 * case.anchor, "lr_scale": 1.0, "verify": case.verify}
    if case.model == "norm" and case.is_exact:
        found["sync_batchnorm"] = True
    for name in ("eval_every", "save_every"):
        if (every := getattr(case, name)) is not None:
            found[name] = int(every) if every.isdecimal() else every
    return found


def main() -> None:
    """In the launcher's process; on several machines in each rank's."""
    folder = Path(sys.argv[1])
    case = Case.from_json(json.loads((folder / "case.json").read_text()))
    lost.SILENT_S = case.silent_s
    dump_when_asked(folder)
    if not case.has_network:
        note_generations(folder)
    training = Training(case, folder)
    data = make_data(case)
    fit(
        model=training.model,
        optimizer=training.optimizer,
        step=training.step,
        scheduler=training.scheduler,
        dataset=data,
        evaluate=(data, training.evaluate) if case.eval_every else None,
        callbacks=[Notes(case, folder)],
        **settings_of(case, folder),
    )
