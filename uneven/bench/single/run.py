"""`uneven bench run`: one benchmark run of a model in a mode, with a folder of its own.

The folder holds config.json, metrics.jsonl (one line per epoch), summary.json, the trained state and the timeline.
Quality is measured on the saved state, loaded into a fresh model, by the same function for every mode.
"""

import json
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import uneven
from uneven.api.loop_inputs import check_loop
from uneven.bench import models
from uneven.bench.models.recipe import Recipe
from uneven.bench.models.sets import KINDS, TensorSet, load_set
from uneven.bench.modes import Mode, resolve_mode
from uneven.bench.orders import Order
from uneven.bench.single.folders import FAILURE, MachineFacts, RunRecord, Summary, read_run, write_file
from uneven.bench.undisturbed import measure_undisturbed, to_marks
from uneven.config import Evaluation, RunConfig, Task, resolve
from uneven.data.tensors import TensorData
from uneven.errors import InputError, MachineError, StoppedError
from uneven.files import json_text
from uneven.hardware.cores import pin
from uneven.hardware.device import parse_device, parse_devices
from uneven.hardware.gpus import usable_devices
from uneven.launch.checks.preflight import resolve_auto
from uneven.launch.find_script import Script
from uneven.launch.run import launch
from uneven.launch.script import run_on_ranks
from uneven.results.progress import Reporter
from uneven.results.state import TrainedState
from uneven.timeline.page import write_page
from uneven.train.segment import RankResult, Worker, evaluate_alone, train_with_torch_ddp

EVAL_BATCH = 1000
NOT_ASKED = ("out", "progress", "repeat", "time_limit_s")  # fields of Order that do not affect training


def run_single(order: Order) -> Summary:
    """Train, evaluate and write the folder; returns the summary. A disturbed run may be repeated, see Order."""
    mode = resolve_mode(order.mode, order.devices)
    if mode.is_torch_ddp and (order.compile == "graph" or order.precision != "fp32"):
        settings = f"compile={order.compile!r}, precision={order.precision!r}"
        raise InputError(f"{settings} with mode 'torch-ddp': PyTorch's DDP is run eagerly and in fp32; leave them out")
    task, config = make_task(order), make_config(order, mode)
    train = partial(_train_own_loop, order) if mode.is_own_loop else partial(_train, order, mode, task)
    summary, interference = measure_undisturbed(partial(train, config), order.repeat_limit_s)
    summary = replace(summary, **to_marks(interference))
    write_summary(order.folder, summary)
    return summary


def _train(order: Order, mode: Mode, task: Task, config: RunConfig) -> Summary:
    with _confined_to(mode.cores):
        program = _train_as_torch_ddp if mode.is_torch_ddp else None
        run = launch(task, config, title=f"{order.model} {order.mode}", program=program, keeps=False)
        limit = threading.Timer(order.time_limit_s or threading.TIMEOUT_MAX, run.stop)
        limit.daemon = True
        if order.time_limit_s is not None:
            limit.start()
        try:
            state = run.join()
        finally:
            limit.cancel()
    if not state.finished:
        raise StoppedError(f"not finished after {order.time_limit_s:.0f} s; the state is in {order.folder}")
    return finish_run(order, task, run.config, run.devices, state)


def _train_as_torch_ddp(worker: Worker, folder: Path) -> RankResult:
    """The program of a rank process in mode torch-ddp."""
    del folder
    return train_with_torch_ddp(worker)


def make_task(order: Order) -> Task:
    """The order's model, optimizer and loaded data; InputError if model and data do not fit each other."""
    recipe = models.get(order.model)
    make_model: Callable[..., Any] = recipe.make_model
    data = load_set(order.data or recipe.data)
    _check_fit(recipe, order.data or recipe.data, data)
    test = data.test if order.eval_samples is None else _first(data.test, order.eval_samples, "--eval-samples")
    if data.vocabulary is not None:
        make_model = partial(make_model, data.vocabulary)
    return Task(
        make_model,
        recipe.make_optimizer,
        recipe.train_step,
        data.train if order.samples is None else _first(data.train, order.samples),
        recipe.make_scheduler,
        Evaluation(test, recipe.eval_step, 1 if order.eval_every is None else order.eval_every, EVAL_BATCH),
    )


def make_config(order: Order, mode: Mode) -> RunConfig:
    recipe = models.get(order.model)
    return resolve(
        {
            "batch_size": recipe.batch_size if order.batch_size is None else order.batch_size,
            "global_batch_size": order.global_batch_size,
            "epochs": recipe.epochs if order.epochs is None else order.epochs,
            "devices": str(usable_devices()[0]) if mode.devices == "auto" else mode.devices,  # a solo mode: one of them
            "policy": mode.policy,
            "backend": mode.backend,
            "seed": order.seed,
            "precision": order.precision,
            "compile": order.compile,
            "lr_scale": order.lr_scale,
            "out": order.folder,
            "progress": order.progress,
        }
    )


def _train_own_loop(order: Order, config: RunConfig) -> Summary:
    """Start own_loop.py as `uneven run` starts scripts; its rank 0 writes the folder, and the summary is read back."""
    if order.eval_every is not None:
        raise InputError(
            f"--eval-every {order.eval_every} with mode {order.mode!r}: a loop of your own is evaluated once, after "
            f"training; leave it out, or use mode 'cpu-{config.policy}'"
        )
    devices = parse_devices(config.devices)
    resolve_auto(config, devices)
    check_loop(config, len(devices))
    reporter = Reporter("off" if order.progress == "off" else "lines")
    record = json.dumps({**vars(order), "out": str(order.out)})
    run_on_ranks(Script(Path(__file__).with_name("own_loop.py"), (record,)), devices, reporter, keeps=False)
    run = read_run(order.folder)
    assert isinstance(run, RunRecord), "its rank 0 has written it"
    return run.summary


def finish_run(order: Order, task: Task, config: RunConfig, devices: Sequence[str], state: TrainedState) -> Summary:
    """Evaluate the trained state and write the rest of its folder; returns the summary."""
    assert task.evaluation is not None, "every recipe is evaluated"
    recipe = models.get(order.model)
    device = torch.device(parse_device(devices[0]).torch_name)
    quality = measure_quality(state, recipe, task.make_model, task.evaluation.dataset, device)
    summary = _summary(order, recipe, config, devices, state, quality)
    _write_page(order.folder, state, summary)
    write_file(order.folder / "config.json", json.dumps(config.to_json(), indent=1))
    write_file(order.folder / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in state.history))
    write_summary(order.folder, summary)  # last: a folder with a summary is a finished run
    return summary


def measure_quality(
    state: TrainedState, recipe: Recipe, make_model: Callable[[], Any], test: TensorData, device: torch.device
) -> dict[str, float]:
    """The metrics of a trained state, in fp32, on the whole test set."""
    model = state.load_into(make_model()).to(device)
    return evaluate_alone(model, recipe.eval_step, test, device, EVAL_BATCH)


def _summary(
    order: Order,
    recipe: Recipe,
    config: RunConfig,
    devices: Sequence[str],
    state: TrainedState,
    quality: dict[str, float],
) -> Summary:
    assert state.timeline is not None, "a joined run has a timeline"
    account = max(state.timeline.accounts, key=lambda rank: rank.training_s)
    return Summary(
        model=order.model,
        mode=order.mode,
        data=order.data or recipe.data,
        devices=list(devices),
        seed=order.seed,
        epochs=config.epochs,
        batch_size=config.batch_size,
        global_batch_size=config.global_batch_size,
        precision=config.precision,
        compile=config.compile,
        lr_scale=config.lr_scale,
        eval_samples=order.eval_samples,
        asked={name: value for name, value in vars(order).items() if name not in NOT_ASKED},
        metric=recipe.metric,
        quality=quality,
        published=recipe.published.value if recipe.published else None,
        samples=state.samples,
        dropped=sum(samples for _, _, _, samples in state.dropped),
        train_seconds=account.training_s,
        samples_per_s=state.samples / account.training_s,
        wall_seconds=account.wall_s,
        shares=dict(account.shares),
        sample_shares=[own / max(1, state.samples) for own in state.rank_samples],
        backend=config.backend if len(devices) > 1 else None,
        peak_memory_bytes=_peak_memory(state),
        machine=MachineFacts(_processor(devices[0]), torch.__version__, uneven.__version__),
    )


def write_summary(folder: Path, summary: Summary) -> None:
    write_file(folder / "summary.json", json_text(summary))
    with suppress(FileNotFoundError):
        (folder / FAILURE).unlink()  # of an earlier attempt


def _write_page(folder: Path, state: TrainedState, summary: Summary) -> None:
    assert state.timeline is not None, "a joined run has a timeline"
    facts = {
        "data": f"{summary.data}, {summary.epochs} epochs",
        "devices": ", ".join(summary.devices),
        summary.metric: f"{summary.quality[summary.metric]:.4f}",
        "training": f"{summary.train_seconds:.1f} s, {summary.samples_per_s:,.0f} samples/s",
        "machine": f"{summary.machine.processor}, torch {summary.machine.torch}",
    }
    title = f"{summary.model} {summary.mode}, seed {summary.seed}"
    # Without bokeh, which is an extra, a run has everything but its page.
    with suppress(MachineError):
        write_page(folder / "timeline.html", state.timeline, state.history, title, facts)


@contextmanager
def _confined_to(cores: Sequence[int]) -> Iterator[None]:
    """Inside, pin this process to `cores` with as many threads; afterwards restore both for the next run."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    threads = torch.get_num_threads()
    pin(cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        pin(before)
        torch.set_num_threads(threads)


def _check_fit(recipe: Recipe, name: str, data: TensorSet) -> None:
    expected = KINDS[recipe.data]
    if data.kind != expected:
        raise InputError(f"{recipe.name} is made for {recipe.data} ({expected}), not for {name} ({data.kind})")


def _first(data: TensorData, samples: int, flag: str = "--samples") -> TensorData:
    if samples < 1:
        raise InputError(f"{flag} {samples} must be at least 1 (the set has {len(data):,})")
    return data.first(samples)


def _peak_memory(state: TrainedState) -> int:
    """The largest peak of any rank: of device memory on CUDA, of process memory on a CPU."""
    assert state.timeline is not None, "a joined run has a timeline"
    on_devices = [event.fields["peak_bytes"] for event in state.timeline.events if event.kind == "memory"]
    return max([*on_devices, *(sample.process_bytes for sample in state.timeline.samples if not on_devices)], default=0)


def _processor(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(parse_device(device).torch_name)
    from uneven.hardware.system import read_system

    return read_system().cpu.model or platform.machine()
