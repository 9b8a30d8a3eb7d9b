"""A rank as a process of its own: `python -m uneven.launch.rank FOLDER RANK`. Payload in, files out.

The launcher has written FOLDER (private, on this machine): plan.json, the payload and its tensors. The rank leaves
result-R/ there, or error-R.json with its own traceback. It ends with os._exit: torch's Gloo threads sometimes abort
a clean interpreter shutdown.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uneven.errors import InputError
from uneven.launch.cleanup import end_orphaned_run, guard, record_pid
from uneven.launch.processes import INTERRUPTED


class _Board:
    """What the rank shows of itself: written by its main thread, read by the poster's."""

    def __init__(self, device: str) -> None:
        self.shown: dict[str, Any] = {"phase": "setup", "slot": 0, "device": device}

    def started(self, axis: Any, place: str) -> None:
        del place
        self.shown = {**self.shown, "total": axis.samples * axis.epochs, "epochs": axis.epochs}

    def stepped(self, samples: int, own_samples: int, training_s: float, loss: float) -> None:
        self.shown = {**self.shown, "samples": samples, "own": own_samples, "seconds": training_s, "loss": loss}

    def epoch_done(self, entry: dict[str, Any]) -> None:
        self.shown = {**self.shown, "history": [*self.shown.get("history", []), entry]}

    def say(self, lines: Sequence[str]) -> None:
        self.shown = {**self.shown, "notes": [*self.shown.get("notes", []), *lines]}


def main(folder: Path, rank: int) -> None:
    # Ctrl-C reaches the whole terminal's group; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = json.loads((folder / "plan.json").read_text())
    record_pid(folder, rank)
    guard(folder, plan["launcher"])
    from uneven.hardware.cores import pin

    pin(plan["cores"][rank])
    import torch

    torch.set_num_threads(plan["threads"][rank])
    code = 0
    try:
        if plan["script"] is None:
            _train(folder, rank, plan)
        else:
            from uneven.launch.script import execute_as_rank

            execute_as_rank(folder, rank, plan)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException as error:
        code = 1
        report = {
            "time": time.time(),
            "rank": rank,
            "kind": "input" if isinstance(error, InputError) else "other",
            "message": str(error),
            "what": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
        temporary = folder / f".error-{rank}"
        temporary.write_text(json.dumps(report))
        temporary.rename(folder / f"error-{rank}.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _train(folder: Path, rank: int, plan: dict[str, Any]) -> None:
    import torch
    from torch import nn

    from uneven.comm.fingerprint import agree, describe_tensors
    from uneven.comm.group import Group, form_group
    from uneven.comm.store import reach_store
    from uneven.hardware.backend import is_crowded
    from uneven.hardware.device import parse_devices
    from uneven.launch.heartbeat import Heartbeat
    from uneven.launch.payload import read_payload
    from uneven.train.rank_info import RankInfo
    from uneven.train.worker import Worker

    board, stop = _Board(plan["devices"][rank]), threading.Event()
    worker: Worker | None = None

    def show() -> dict[str, Any]:
        if worker is None:
            return {**board.shown, "phase": "setup"}
        return {**board.shown, **worker.show()}

    store = reach_store("127.0.0.1", plan["port"])
    poster = Heartbeat(plan["port"], rank, show, stop, lambda: end_orphaned_run(folder))
    devices = parse_devices(plan["devices"])

    def join(model: nn.Module) -> Group:
        lines = describe_tensors([*model.named_parameters(), *model.named_buffers()])
        agree(store, rank, len(devices), lines)
        device = torch.device(devices[rank].torch_name)
        return form_group(store, rank, len(devices), device, config.backend, is_crowded(devices))

    task, config, program = read_payload(folder)
    store.set(f"loaded/{rank}", "1")
    worker = Worker(task, config, RankInfo(rank, devices), join, stop, board)
    home = folder / f"result-{rank}"
    home.mkdir()
    if program is None:
        worker.train().save(home, is_lead=rank == 0)
    else:
        program(worker, home)
    poster.close()
    worker.group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
