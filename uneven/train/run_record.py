"""What a run knows of its own past, over all its segments: kept by the worker, in checkpoints and in the log.

And what a loop of the user's own keeps there beside the model: `ddp.register(name, value)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from uneven.errors import InputError
from uneven.results.state_tree import split_tree


@dataclass
class RunRecord:
    """What the run knows of its own past, over all its segments; a resumed run goes on with it."""

    history: list[dict[str, Any]] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)  # slots at which all ranks met for a checkpoint
    stop_rounds: list[int] = field(default_factory=list)  # rounds of a local policy after which a stop was saved
    segments: list[dict[str, Any]] = field(default_factory=list)  # where the run began and was resumed, on what
    earlier_logs: list[dict[str, Any]] = field(default_factory=list)  # of ranks of earlier segments that are gone
    generations: list[dict[str, Any]] = field(default_factory=list)  # those that are over, with what each rank trained
    # By member: what it had trained before the run was resumed. When the member is lost, it goes to `earlier_logs`.
    resumed_logs: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost_logs: list[dict[str, Any]] = field(default_factory=list)  # of members of `generations` that are gone
    member: str | None = None  # the member that keeps this record, where ranks may be lost or join
    train_seconds: float = 0.0  # of earlier segments
    kept: tuple[dict[str, Any], dict[str, Any]] | None = None  # tensors that a callback kept, and their entry
    monitored: str | None = None  # the metric that keep_best or a ReduceLROnPlateau follows, once it was evaluated
    user: dict[str, Any] = field(default_factory=dict)  # what the user's own loop registered


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
