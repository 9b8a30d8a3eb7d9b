"""What a loop of the user's own keeps in checkpoints beside the model: `ddp.register(name, value)`.

Called by api/loop_calls.py, when a value is registered, and by train/saves.py at every checkpoint.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from uneven.errors import InputError
from uneven.results.state_tree import split_tree
from uneven.train.run_record import RunRecord


def register(run: RunRecord, name: str, value: Any, saved: Callable[[], Mapping[str, Any]]) -> Any:
    """Keep a value of the user's in checkpoints; returns it with what was `saved` of it, in a resumed run once."""
    if not isinstance(name, str) or not name:
        raise InputError(f"register({name!r}, ...): the name must be text, as in 'tokenizer'")
    known = saved() if name not in run.user else {}
    value = load_user_state(value, known[name]) if name in known else value
    split_tree(user_state(value), name)  # what cannot be kept is told now, not at the first checkpoint
    run.user[name] = value
    return value


def user_state(value: Any) -> Any:
    """What is kept of an object that the user registered."""
    state_dict = getattr(value, "state_dict", None)
    return state_dict() if callable(state_dict) else value


def load_user_state(value: Any, saved: Any) -> Any:
    """Give a registered object its saved state, in place where it can be; returns the object to go on with."""
    load = getattr(value, "load_state_dict", None)
    if callable(load):
        load(saved)
        return value
    if isinstance(value, dict) and isinstance(saved, dict):
        value.clear()
        value.update(saved)
        return value
    if isinstance(value, list) and isinstance(saved, list):
        value[:] = saved
        return value
    if isinstance(value, Tensor) and isinstance(saved, Tensor):
        with torch.no_grad():
            value.copy_(saved)
        return value
    return saved
