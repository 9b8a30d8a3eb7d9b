"""One trial of the user's functions before rank processes are started: what is wrong with them then costs no start.

Called by launch/checks/preflight.py in the launcher; a device alone needs none, since its engine makes the same checks
at once. Model, optimizer and scheduler are made in a forked child and dropped with it, so that nothing is left of the
trial: no random numbers drawn, nothing printed, no memory, no process, not even where a function hangs. The train step
is not run: it may write somewhere. What the trial does not find, the ranks do.

What the functions made is compared in rank 0 (launch/rank.py): the ranks import the user's modules anew. A setting that
the script has changed there is refused (data/script_settings.py); an object is not compared, so that a model or an
optimizer may be another one than the script means. That is no error: a function may ask for the world size, which only
a rank knows.
"""

import gc
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from uneven.config import RunConfig, Task
from uneven.errors import InputError
from uneven.launch.late_dynamo import load_dynamo_late
from uneven.parallel.catalog import check_optimizer
from uneven.parallel.sharded_init import dry_run, without_reads
from uneven.policy.axis import Axis
from uneven.train.engine import check_dense, check_types, checked_model, checked_optimizer, make_schedule

WHY = (
    "the ranks import your modules anew, and an object that the script has changed in one of them is not changed "
    "there; pass it to your functions as an argument, or start the script by uneven run"
)
LIMIT_S = 10.0  # a model that takes longer is left to the ranks


def try_functions(task: Task, config: RunConfig, axis: Axis) -> dict[str, dict[str, str]] | None:
    """InputError where the functions make what cannot be trained; else what they made, None where that is not known.

    An exception of their own is left to the ranks, which report it with their name and traceback: a function may need
    what only a rank has.
    """

    def make_all() -> dict[str, dict[str, str]]:
        torch.default_generator.manual_seed(config.seed)
        # As the ranks make it: shard by shard where it is to be sharded, and no larger here.
        blueprint = dry_run(task.make_model) if config.strategy == "fsdp" else None
        model = checked_model(task.make_model() if blueprint is None else blueprint.model)
        check_types(model)
        make_optimizer = task.make_optimizer if blueprint is None else without_reads(task.make_optimizer)
        optimizer = checked_optimizer(make_optimizer(model.parameters()), model)
        check_dense(optimizer, config)
        check_optimizer(config.strategy, optimizer, config.redundancy)
        made = {"model": describe_model(model), "optimizer": describe_optimizer(optimizer)}
        make_schedule(task.make_scheduler, optimizer, config, axis)
        return made

    found = json.loads(_result_of(make_all) or "{}") if hasattr(os, "fork") else {}
    if "error" in found:
        raise InputError(found["error"])
    return found.get("made")


def _result_of(body: Callable[[], Any]) -> str:
    """Run `body` in a forked child; as JSON what it made, or the message of its InputError. Empty: something else."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a child that hangs, for whatever reason, is ended
        pid = os.fork()
    if pid == 0:
        _run_and_exit(body, writing)
    os.close(writing)
    try:
        return _read_all(reading)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # with whatever it has started
        os.waitpid(pid, 0)


def _run_and_exit(body: Callable[[], Any], writing: int) -> NoReturn:
    """In the child: silent, on one thread (a pool of OpenMP's does not survive a fork), gone when it is done.

    Garbage of the parent's stays uncollected: freeing a CUDA object in a forked child aborts it.
    """
    gc.disable()
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  a notebook's streams are not these files
        torch.set_num_threads(1)
        load_dynamo_late()
        _write_all(writing, {"made": body()})
    except InputError as error:
        _write_all(writing, {"error": str(error)})
    except BaseException:
        # Not lost: whatever else the functions raise here (a library that must not be forked, a device that only a rank
        # has) may be the trial's own fault, and the ranks run them again and report it with a traceback.
        pass
    finally:
        os._exit(0)


def _write_all(writing: int, result: Any) -> None:
    with os.fdopen(writing, "wb") as file:
        file.write(json.dumps(result).encode())


def _read_all(reading: int) -> str:
    """What the child writes before it closes the pipe; empty where it takes too long."""
    end_s = time.monotonic() + LIMIT_S
    content = b""
    while select.select([reading], [], [], max(0.0, end_s - time.monotonic()))[0]:
        piece = os.read(reading, 1 << 16)
        if not piece:
            return content.decode()
        content += piece
    return ""


def describe_model(model: nn.Module) -> dict[str, str]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in tensors}


def describe_optimizer(optimizer: Optimizer) -> dict[str, str]:
    """Its class, and the settings of its groups that are numbers, or several of them."""
    found = {"class": type(optimizer).__name__}
    for place, group in enumerate(optimizer.param_groups):
        where = "" if len(optimizer.param_groups) == 1 else f" of param group {place}"
        found |= {f"{name}{where}": repr(value) for name, value in group.items() if _is_setting(value)}
    return found


def compare_in_rank(task: Task, say: Callable[[Sequence[str]], None]) -> Task:
    """The task, whose functions say where they make something else than the launcher's trial."""
    made = task.made
    if made is None:
        return task

    def make_model() -> nn.Module:
        model = task.make_model()
        say(_differences("the model's", made["model"], describe_model(model)))
        return model

    def make_optimizer(params: Any) -> Optimizer:
        optimizer = task.make_optimizer(params)
        say(_differences("the optimizer's", made["optimizer"], describe_optimizer(optimizer)))
        return optimizer

    return replace(task, make_model=make_model, make_optimizer=make_optimizer)


def _differences(whose: str, there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """One line at most, with the first difference."""
    for name in dict.fromkeys((*there, *here)):
        if there.get(name) != here.get(name):
            one, other = here.get(name, "missing"), there.get(name, "missing")
            return [f"  {whose} {name} is {one} in the ranks and {other} where the script runs: {WHY}"]
    return []


def _is_setting(value: Any) -> bool:
    numbers = value if isinstance(value, tuple | list) else (value,)
    return bool(numbers) and all(isinstance(number, int | float) for number in numbers)
