"""One trial of the user's functions in the launcher: what is wrong with them then costs no start of rank processes.

Called by launch/preflight.py before ranks are started; a device alone needs none, since its engine makes the same
checks at once. Only model, optimizer and scheduler are made, on the CPU, and dropped again: the train step is not run,
because a user's step may count or log. The launcher's random states are as before afterwards.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from uneven.config import RunConfig, Task
from uneven.step.schedule import Schedule
from uneven.train.built import checked_model, checked_optimizer


def try_functions(task: Task, config: RunConfig, schedule_length: int) -> None:
    """InputError where the functions cannot make what a rank trains; their own exceptions pass with their traceback."""
    with _random_states_kept():
        torch.default_generator.manual_seed(config.seed)
        model = checked_model(task.make_model())
        optimizer = checked_optimizer(task.make_optimizer(model.parameters()), model)
        Schedule(task.make_scheduler, optimizer, schedule_length)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)
