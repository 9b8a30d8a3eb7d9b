"""One rank of one row of the benchmark of strategies: `python -m uneven.bench.strategies.rank FOLDER RANK PORT`.

FOLDER has task.json; the rank leaves rank-R.json there, with its results, or with the cause why there are none.
"""

import gc
import json
import math
import os
import signal
import statistics
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

from uneven.bench.strategies.live_bytes import LiveBytes
from uneven.bench.strategies.memory import Held, is_whole, measure, predict, predict_muon, uncut
from uneven.bench.strategies.pairs import alternate
from uneven.bench.strategies.task import (
    ALONE,
    DENSE,
    Batches,
    StrategyTask,
    Trained,
    by_kind,
    make_model,
    make_trained,
    reference_of,
    step,
)
from uneven.bench.strategies.wire import sent_bytes
from uneven.comm.gather import gather_checksums
from uneven.comm.group import Group, SoloGroup, TorchGroup
from uneven.comm.store import reach_store
from uneven.hardware.cores import pin
from uneven.launch.lifeline import end_with_parent

WARM_UP = 2  # steps whose time does not count


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
        found = alternate(task, group, device) if task.against is not None else _measure_row(task, group, device)
        group.all_reduce(torch.zeros(1)).wait()  # no rank leaves while another still sends
    except Exception as error:
        traceback.print_exc()
        # By the machine's clock: the first rank that failed is the cause, the others miss it.
        found, code = {"failed_at": time.monotonic(), "cause": f"{type(error).__name__}: {error}"}, 1
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    sys.stderr.flush()
    os._exit(code)  # torch may abort when the interpreter ends with a group


def _measure_row(task: StrategyTask, group: Group, device: torch.device) -> dict[str, Any]:
    trained = make_trained(task.row, make_model(task.row, task.model).to(device), group, task.shares)
    batches = Batches(task.row, task.model, group, device)
    losses = [step(trained, batches, number) for number in range(WARM_UP)]
    timed = _timed_steps(trained, batches, range(WARM_UP, task.steps), group, device, losses)
    gc.collect()
    held = measure(trained, trained.module, trained.optimizer, device)
    peak = _peak_of_a_step(trained, batches, task.steps, device, losses)
    total = group.all_reduce(torch.stack(losses).double().cpu()).wait() if batches.is_cut else torch.stack(losses).cpu()
    return {
        "predicted": asdict(_predicted(task, group.rank)),
        "uncut": 0 if reference_of(task.row) != DENSE else uncut(task.row, _meta(task)),
        "held": asdict(held),
        "peak": peak,
        **timed,
        "losses": total.tolist(),
        **_check(task, trained, group),
    }


def _timed_steps(
    trained: Trained, batches: Batches, numbers: range, group: Group, device: torch.device, losses: list[Tensor]
) -> dict[str, Any]:
    group.all_reduce(torch.zeros(1)).wait()
    _forget_peak_rss()
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
    """Of all tensors, from one quiet point to the next: old gradients, activations, temporaries."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        losses.append(step(trained, batches, number))
        return int(torch.cuda.max_memory_allocated(device))
    with LiveBytes() as seen:
        losses.append(step(trained, batches, number))
    return int(seen.peak)  # its base has no types


def _predicted(task: StrategyTask, rank: int) -> Held:
    model = _meta(task)
    is_own = not task.row.startswith("torch-")
    shares = task.shares if task.shares is not None and is_own else [1.0] * task.ranks
    if reference_of(task.row) == DENSE:
        return predict(task.row, model, shares, rank)
    matrices, others = by_kind(model)
    sizes = [param.numel() for param in matrices]
    return predict_muon(sizes, sum(param.numel() for param in others), shares, [1.0] * task.ranks, rank)


def _meta(task: StrategyTask) -> nn.Module:
    with torch.device("meta"):
        return make_model(task.row, task.model)


def _check(task: StrategyTask, trained: Trained, group: Group) -> dict[str, Any]:
    """Compare params that all ranks hold bit by bit, and the full model with that of one rank alone."""
    shape = _meta(task)
    whole = [
        (name.removeprefix("module."), getattr(param, "_local_tensor", param))
        for name, param in trained.module.named_parameters()
        if is_whole(name.removeprefix("module."), shape, task.row)
    ]
    unequal = [name for name, param in whole if len(set(gather_checksums(group, [param]))) > 1]
    state = trained.full_state().model
    place = Path(task.home) / f"{reference_of(task.row)}.safetensors"
    if task.row in ALONE:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, place)
    found: dict[str, Any] = {"compared": len(whole), "unequal": unequal}
    return found | (_difference(state, load_file(place), task) if group.rank == 0 else {})


def _difference(state: dict[str, Tensor], alone: dict[str, Tensor], task: StrategyTask) -> dict[str, Any]:
    """`drift`: the distance to the reference over the distance trained; `worst`: the param with the largest error."""
    assert state.keys() == alone.keys(), sorted(state.keys() ^ alone.keys())
    start = make_model(task.row, task.model).state_dict()
    off = {name: float((state[name].double() - alone[name].double()).norm()) for name in alone}
    way = math.sqrt(sum(float((alone[name].double() - start[name].double()).norm()) ** 2 for name in alone))
    relative = {name: off[name] / max(float(alone[name].double().norm()), 1e-30) for name in alone}
    worst = max(relative, key=lambda name: relative[name])
    return {"drift": math.sqrt(sum(error**2 for error in off.values())) / way, "worst": [worst, relative[worst]]}


def _forget_peak_rss() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_rss() -> int | None:
    try:
        fields = Path("/proc/self/status").read_text().split()
    except OSError:
        return None
    return int(fields[fields.index("VmHWM:") + 1]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
