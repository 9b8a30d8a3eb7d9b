"""What a checkpoint holds beside params and RunState: an optimizer's state by param name, and random generators.

Used by train/saves.py and train/resume.py; launch/checks/resume.py compares the optimizer before a rank starts.
Checkpoints of earlier versions have neither the class of the optimizer nor entries of its own. Each rank has its own
random states: dropout masks differ.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from uneven.errors import InputError
from uneven.results.state_tree import join_tree, split_tree
from uneven.step.several import OptimizerGroup

# Settings of a param group that say how this device computes, not what.
DEVICE_KEYS = ("foreach", "fused", "capturable", "differentiable")
STANDARD = ("state", "param_groups")


def kind_of(optimizer: Optimizer) -> str:
    """The class of an optimizer as the user made it; of several, that of each."""
    members = optimizer.members.values() if isinstance(optimizer, OptimizerGroup) else [optimizer]
    return ", ".join(type(member).__name__ for member in members)


def describe_made(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer as the user has made it: its class, and the settings of its groups but for learning rates, which
    are a schedule's. To be asked before anything is trained: training may change what a group holds."""
    passed = ("params", "lr", "initial_lr", *DEVICE_KEYS)
    groups = [{key: value for key, value in group.items() if key not in passed} for group in optimizer.param_groups]
    settings = [{key: _plain(value) for key, value in group.items() if _is_plain(value)} for group in groups]
    return {"class": kind_of(optimizer), "settings": settings}


def kept_settings(saved: Mapping[str, Any], optimizer: Optimizer) -> list[str]:
    """A line for each setting of this run's optimizer that has no effect, because the checkpoint's is kept."""
    own, lines = describe_made(optimizer)["settings"], []
    for number, (theirs, ours) in enumerate(zip(saved.get("settings", ()), own, strict=False)):
        place = f" in param group {number}" if len(own) > 1 else ""
        lines += [
            f"  the optimizer's {key}={theirs[key]!r}{place} is kept from the checkpoint; {value!r} has no effect"
            for key, value in ours.items()
            if key in theirs and theirs[key] != value
        ]
    return lines


def split_optimizer(
    state: Mapping[str, Any], names: Sequence[str], made: Mapping[str, Any]
) -> tuple[Any, dict[str, Tensor]]:
    """(what JSON holds, tensors) of a `state_dict`; InputError names what cannot be kept. `made`: `describe_made`.

    Of a param group's settings, functions and other objects are left out: the script makes them anew.
    """
    by_name = {names[place]: values for place, values in state["state"].items() if isinstance(place, int)}
    groups = [
        {**{key: value for key, value in group.items() if _is_kept(value)}, "params": [names[p] for p in places]}
        for group in state["param_groups"]
        for places in [group["params"]]
    ]
    # An optimizer may keep state that is no param's, in `optimizer.state` or beside it.
    own = {key: value for key, value in state.items() if key not in STANDARD}
    own_state = {key: values for key, values in state["state"].items() if not isinstance(key, int)}
    parts = {"state": (by_name, "optimizer"), "param_groups": (groups, "param_groups")}
    parts |= {"own": (own, "optimizer_own"), "own_state": (own_state, "optimizer_own_state")}
    skeletons = dict(made)
    tensors: dict[str, Tensor] = {}
    for name, (value, path) in parts.items():
        skeletons[name], found = split_tree(value, path)
        tensors |= found
    return skeletons, tensors


def join_optimizer(
    saved: Mapping[str, Any], tensors: Mapping[str, Tensor], names: Sequence[str], optimizer: Optimizer, what: str
) -> dict[str, Any]:
    """As `load_state_dict` takes it: state by place, and the saved groups with this device's own switches."""
    state, groups = join_tree(saved["state"], tensors), join_tree(saved["param_groups"], tensors)
    own_groups = optimizer.param_groups
    saved_names = [name for group in groups for name in group["params"]]
    if saved_names != names or [len(g["params"]) for g in groups] != [len(g["params"]) for g in own_groups]:
        raise InputError(
            f"{what}: its optimizer has {len(groups)} groups of other params than this one's {len(own_groups)}; make "
            "the optimizer as that run did"
        )
    places = iter(range(len(names)))
    merged = [
        {
            **{key: value for key, value in own.items() if key not in saved_group or key in DEVICE_KEYS},
            **{key: value for key, value in saved_group.items() if key not in DEVICE_KEYS},
            "params": [next(places) for _ in saved_group["params"]],
        }
        for saved_group, own in zip(groups, own_groups, strict=True)
    ]
    by_place = lay_out({place: state[name] for place, name in enumerate(names) if name in state}, optimizer)
    return {
        **join_tree(saved.get("own", {}), tensors),
        "state": {**by_place, **join_tree(saved.get("own_state", {}), tensors)},
        "param_groups": merged,
    }


def lay_out(state: Mapping[Any, Any], optimizer: Optimizer) -> dict[Any, Any]:
    """State by place, its tensors in memory as the optimizer itself would make them: in the order of their param.

    Files and collectives give the rows of a tensor one after the other. A fused step goes through the memory of param
    and state side by side, so beside a param in channels_last, or transposed, it would take other elements' state.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    laid_out = dict(state)  # with state that is no param's, if there is any
    for place, param in enumerate(params):
        if place in state:
            laid_out[place] = {key: _as_param_is(value, param) for key, value in state[place].items()}
    return laid_out


def _as_param_is(value: Any, param: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != param.shape or value.stride() == param.stride():
        return value
    return torch.empty_like(param, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def check_optimizer(saved: Mapping[str, Any], optimizer: Optimizer, what: str) -> None:
    """InputError where a checkpoint is of another optimizer: its state would mean something else, or nothing."""
    own = kind_of(optimizer)
    if (kind := saved.get("class")) is not None:
        is_other = kind != own
    else:  # neither's settings are among the other's; a version of torch, or a scheduler, may add some
        kind = "another one"
        pairs = zip(saved["param_groups"], optimizer.param_groups, strict=False)
        is_other = any(not (theirs.keys() <= ours.keys() or ours.keys() <= theirs.keys()) for theirs, ours in pairs)
    if is_other:
        raise InputError(f"{what}: its optimizer is {kind}, this run's is {own}; make the optimizer as that run did")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _is_kept(value: Any) -> bool:
    try:
        split_tree(value, "")
    except InputError:
        return False
    return True


def seed_random(seed: int, *, is_own_loop: bool) -> None:
    """Seed torch, and for `fit` Python and numpy, too: a train step may draw from them. A user's loop seeds its own."""
    torch.manual_seed(seed)
    if not is_own_loop:
        random.seed(seed)
        np.random.seed(seed % 2**32)


class RandomStates(NamedTuple):
    """As the generators give them."""

    python: Any
    numpy: Any
    cpu: Tensor  # torch's
    cuda: Tensor | None  # None where the device is another

    @classmethod
    def read(cls, device: torch.device) -> "RandomStates":
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self, device: torch.device) -> None:
        """Set all generators; that of a kind of device that is not among them goes on as it is."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if device.type == "cuda" and self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


def capture_random(device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(JSON, tensors by name) of all generators, as they are now."""
    states = RandomStates.read(device)
    version, numbers, gauss = states.python
    kind, keys, *rest = states.numpy
    record = {"python": [version, gauss], "numpy": [kind, *rest]}
    tensors = {
        "random.python": torch.tensor(numbers, dtype=torch.int64),
        "random.numpy": torch.from_numpy(np.array(keys, dtype=np.int64)),
        "random.torch": states.cpu,
    }
    if states.cuda is not None:
        tensors["random.cuda"] = states.cuda
    return record, tensors


def restore_random(record: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Set all generators to what `capture_random` returned."""
    version, gauss = record["python"]
    kind, *rest = record["numpy"]
    python = (version, tuple(tensors["random.python"].tolist()), gauss)
    numpy = (kind, tensors["random.numpy"].numpy().astype(np.uint32), *rest)
    RandomStates(python, numpy, tensors["random.torch"], tensors.get("random.cuda")).restore(device)
