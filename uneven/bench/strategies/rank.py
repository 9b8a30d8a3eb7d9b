"""A rank process of `uneven bench strategies`: `python -m uneven.bench.strategies.rank FOLDER RANK PORT`.

Started by measure.py for one row of the table, or for two with `--paired`. It reads FOLDER/task.json and writes
FOLDER/rank-R.json: its measurements, or `cause` and `failed_at` if it failed.
"""

import gc
import json
import math
import os
import signal
import socket
import stat
import statistics
import struct
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from uneven.bench.strategies.memory import (
    Held,
    LiveBytes,
    is_replicated,
    measure,
    predict,
    predict_muon,
    replicated_bytes,
)
from uneven.bench.strategies.task import (
    ALONE,
    DENSE,
    REDUNDANT,
    Batches,
    StrategyTask,
    Trained,
    by_kind,
    make_model,
    make_trained,
    reference_of,
    step,
)
from uneven.comm.gather import gather_checksums, gather_rows
from uneven.comm.group import Group, SoloGroup
from uneven.comm.observed import BackwardTail, observe_collectives
from uneven.comm.store import reach_store
from uneven.comm.torch_group import TorchGroup
from uneven.hardware.cores import pin
from uneven.launch.lifeline import end_with_parent

WARM_UP = 2  # steps whose time does not count
OVERLAP_STEPS = 2
WAITS_IN_BACKWARD = ("torch-ddp", "torch-zero1")  # DistributedDataParallel waits in C++, after the last gradient
UNSEEN = ("torch-tensor",)  # its collectives start in C++
TCPI_BYTES_SENT = 200  # offset of tcpi_bytes_sent in struct tcp_info, since Linux 4.19


def main(folder: Path, rank: int, port: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    end_with_parent()
    task = StrategyTask(**json.loads((folder / "task.json").read_text()))
    code = 0
    try:
        pin(task.cores[rank])
        torch.set_num_threads(task.threads[rank])
        group: Group = SoloGroup()
        if task.ranks > 1:
            group = TorchGroup(reach_store("127.0.0.1", port), rank, task.ranks)
        device = torch.device(task.device)
        result = alternate(task, group, device) if task.against is not None else _measure_row(task, group, device)
        group.all_reduce(torch.zeros(1)).wait()  # no rank leaves while another still sends
    except Exception as error:
        traceback.print_exc()
        # Ranks on one machine share this clock. The first failure is the cause: the others fail because a peer is gone.
        result, code = {"failed_at": time.monotonic(), "cause": f"{type(error).__name__}: {error}"}, 1
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    sys.stderr.flush()
    os._exit(code)  # torch may abort when the interpreter exits with an open process group


def _measure_row(task: StrategyTask, group: Group, device: torch.device) -> dict[str, Any]:
    trained = make_trained(task.row, make_model(task.row, task.model).to(device), group, task.shares, task.redundancy)
    batches = Batches(task.row, task.model, group, device)
    losses = [step(trained, batches, number) for number in range(WARM_UP)]
    timed = _timed_steps(trained, batches, range(WARM_UP, task.steps), group, device, losses)
    gc.collect()
    held = measure(trained, trained.module, trained.optimizer, device)
    peak = _peak_of_a_step(trained, batches, task.steps, device, losses)
    overlap = measure_overlap(task.row, trained, batches, task.steps + 1, device, losses)
    total = torch.stack(losses).cpu()
    if batches.is_split:
        total = group.all_reduce(total.double()).wait()
    return {
        "predicted": asdict(_predicted(task, group.rank)),
        "uncut": 0 if reference_of(task.row) != DENSE else replicated_bytes(task.row, _meta_model(task)),
        "held": asdict(held),
        "peak": peak,
        **timed,
        "communication": overlap,
        "losses": total.tolist(),
        **_check(task, trained, group),
    }


def _timed_steps(
    trained: Trained, batches: Batches, numbers: range, group: Group, device: torch.device, losses: list[Tensor]
) -> dict[str, Any]:
    group.all_reduce(torch.zeros(1)).wait()
    _reset_peak_rss()
    sent, payload = sent_bytes(), group.traffic.payload_bytes
    seconds = []
    for number in numbers:
        began = time.perf_counter()
        losses.append(step(trained, batches, number))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    now = sent_bytes()
    return {
        "seconds": statistics.median(seconds),
        "wire": None if sent is None or now is None else (now - sent) / len(numbers),
        "payload": (group.traffic.payload_bytes - payload) / len(numbers),
        "rss": _peak_rss(),
    }


def _peak_of_a_step(trained: Trained, batches: Batches, number: int, device: torch.device, losses: list[Tensor]) -> int:
    """The most bytes of tensors during one step: params, state, old gradients, activations and temporaries."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        losses.append(step(trained, batches, number))
        return int(torch.cuda.max_memory_allocated(device))
    with LiveBytes() as live:
        losses.append(step(trained, batches, number))
    return int(live.peak)  # `__enter__` of TorchDispatchMode has no type


def measure_overlap(
    row: str, trained: Trained, batches: Batches, first: int, device: torch.device, losses: list[Tensor]
) -> dict[str, float] | None:
    """Seconds of communication in a step: hidden behind compute, or exposed because the rank waits for it.

    None where collectives cannot be seen. Trains OVERLAP_STEPS steps from batch `first` on, after the timed ones, which
    are not observed.
    """
    with observe_collectives() as observed:
        for number in range(first, first + OVERLAP_STEPS):
            tail = BackwardTail(observed) if row in WAITS_IN_BACKWARD else None
            losses.append(step(trained, batches, number, tail))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    names = ("in_flight_s", "hidden_s", "exposed_s")
    return None if row in UNSEEN else {name: getattr(observed, name) / OVERLAP_STEPS for name in names}


def _predicted(task: StrategyTask, rank: int) -> Held:
    model = _meta_model(task)
    takes_shares = not task.row.startswith("torch-")
    shares = task.shares if task.shares is not None and takes_shares else [1.0] * task.ranks
    if reference_of(task.row) == DENSE:
        return predict(task.row, model, shares, rank, task.redundancy if task.row in REDUNDANT else 0)
    matrices, others = by_kind(model)
    sizes = [param.numel() for param in matrices]
    return predict_muon(sizes, sum(param.numel() for param in others), shares, [1.0] * task.ranks, rank)


def _meta_model(task: StrategyTask) -> nn.Module:
    with torch.device("meta"):
        return make_model(task.row, task.model)


def _check(task: StrategyTask, trained: Trained, group: Group) -> dict[str, Any]:
    """Compare replicated params over ranks, bit by bit, and the full model with that of one rank alone."""
    meta_model = _meta_model(task)
    replicated = [
        (name.removeprefix("module."), getattr(param, "_local_tensor", param))
        for name, param in trained.module.named_parameters()
        if is_replicated(name.removeprefix("module."), meta_model, task.row)
    ]
    unequal = [name for name, param in replicated if len(set(gather_checksums(group, [param]))) > 1]
    state = trained.full_state().model
    reference = Path(task.home) / f"{reference_of(task.row)}.safetensors"
    if task.row in ALONE:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, reference)
    comparison: dict[str, Any] = {"compared": len(replicated), "unequal": unequal}
    return comparison | (_difference(state, load_file(reference), task) if group.rank == 0 else {})


def _difference(state: dict[str, Tensor], alone: dict[str, Tensor], task: StrategyTask) -> dict[str, Any]:
    """`drift`: the distance to the reference over the distance trained; `worst`: the param with the largest error."""
    assert state.keys() == alone.keys(), sorted(state.keys() ^ alone.keys())
    start = make_model(task.row, task.model).state_dict()
    errors = {name: float((state[name].double() - alone[name].double()).norm()) for name in alone}
    distance = math.sqrt(sum(float((alone[name].double() - start[name].double()).norm()) ** 2 for name in alone))
    relative = {name: errors[name] / max(float(alone[name].double().norm()), 1e-30) for name in alone}
    worst = max(relative, key=lambda name: relative[name])
    return {
        "drift": math.sqrt(sum(error**2 for error in errors.values())) / distance,
        "worst": [worst, relative[worst]],
    }


class Side:
    """One of the two strategies, with its model and batches."""

    def __init__(self, row: str, task: StrategyTask, group: Group, device: torch.device) -> None:
        self._trained: Trained = make_trained(row, make_model(row, task.model).to(device), group, None)
        self._batches = Batches(row, task.model, group, device)
        self._group = group
        self._device = device
        self._number = 0

    def time_segment(self, steps: int) -> float:
        """Train `steps` steps; returns the seconds they took on the slowest rank."""
        self._group.all_reduce(torch.zeros(1)).wait()
        began = time.perf_counter()
        for _ in range(steps):
            step(self._trained, self._batches, self._number)
            self._number += 1
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        own_s = time.perf_counter() - began
        return max(seconds for (seconds,) in gather_rows(self._group, [own_s]))


def alternate(task: StrategyTask, group: Group, device: torch.device) -> dict[str, Any]:
    """Two strategies in alternating segments, each with a model of its own: seconds per step of every segment.

    Both segments of a pair meet the same state of the machine, so drift cancels in their ratio. Pairs start with either
    side in turn, so that neither is always first.
    """
    assert task.against is not None
    ours, theirs = Side(task.row, task, group, device), Side(task.against, task, group, device)
    for side in (ours, theirs, ours, theirs):
        side.time_segment(task.steps)
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(task.pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds[which].append((ours, theirs)[which].time_segment(task.steps) / task.steps)
    return {"ours": seconds[0], "theirs": seconds[1]}


def _reset_peak_rss() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_rss() -> int | None:
    try:
        fields = Path("/proc/self/status").read_text().split()
    except OSError:
        return None
    return int(fields[fields.index("VmHWM:") + 1]) * 1024


def sent_bytes() -> int | None:
    """Bytes that this process has sent over its open TCP connections, by the kernel's count; None if it has none.

    Headers are not counted. Unlike the counters of a network interface, these leave out what other processes send.
    """
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return None
    counts = [_sent_by(int(descriptor)) for descriptor in os.listdir("/proc/self/fd")]
    return None if None in counts else sum(count for count in counts if count is not None)


def _sent_by(descriptor: int) -> int | None:
    """The bytes sent on a file descriptor: 0 if it is no TCP connection, None if the kernel does not count them."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return 0
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # closed since it was listed
        return 0
    return int(struct.unpack_from("=Q", info, TCPI_BYTES_SENT)[0]) if len(info) >= TCPI_BYTES_SENT + 8 else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
