"""One trial of the user's functions before rank processes are started: what is wrong with them then costs no start.

Called by launch/checks/preflight.py in the launcher; a device alone needs none, since its engine makes the same checks
at once. Model, optimizer and scheduler are made in a forked child and dropped with it, so that nothing is left of the
trial: no random numbers drawn, nothing printed, no memory, no process, not even where a function hangs. The train step
is not run: it may write somewhere. What the trial does not find, the ranks do.
"""

import gc
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import torch

from uneven.config import RunConfig, Task
from uneven.errors import InputError
from uneven.launch.checks.made import describe_model, describe_optimizer
from uneven.parallel.catalog import check_optimizer
from uneven.policy.axis import Axis
from uneven.train.built import check_dense, check_types, checked_model, checked_optimizer
from uneven.train.scheduled import make_schedule

LIMIT_S = 10.0  # a model that takes longer is left to the ranks


def try_functions(task: Task, config: RunConfig, axis: Axis) -> dict[str, dict[str, str]] | None:
    """InputError where the functions make what cannot be trained; else what they made, None where that is not known.

    An exception of their own is left to the ranks, which report it with their name and traceback: a function may need
    what only a rank has.
    """

    def make_all() -> dict[str, dict[str, str]]:
        torch.default_generator.manual_seed(config.seed)
        model = checked_model(task.make_model())
        check_types(model)
        optimizer = checked_optimizer(task.make_optimizer(model.parameters()), model)
        check_dense(optimizer, config)
        check_optimizer(config.strategy, optimizer, config.redundancy)
        made = {"model": describe_model(model), "optimizer": describe_optimizer(optimizer)}
        make_schedule(task.make_scheduler, optimizer, config, axis)
        return made

    told = json.loads(_told_by(make_all) or "{}") if hasattr(os, "fork") else {}
    if "error" in told:
        raise InputError(told["error"])
    return told.get("made")


def _told_by(body: Callable[[], Any]) -> str:
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
        _write_all(writing, {"made": body()})
    except InputError as error:
        _write_all(writing, {"error": str(error)})
    except BaseException:
        # Not lost: whatever else the functions raise here (a library that must not be forked, a device that only a rank
        # has) may be the trial's own fault, and the ranks run them again and report it with a traceback.
        pass
    finally:
        os._exit(0)


def _write_all(writing: int, told: Any) -> None:
    with os.fdopen(writing, "wb") as file:
        file.write(json.dumps(told).encode())


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
