"""Bytes that a strategy should hold on a rank, by the formula, and those that it does hold, by its tensors. In fp32.

The formula, for P params with AdamW on a rank with the share f: params 4 P, gradients 4 P, optimizer state 8 P; of what
a strategy shards the rank holds f times as much. Activations are not in it. Used by rank.py and measure.py.
"""

import fnmatch
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.parallel.flat_shards import assign_tensors
from uneven.parallel.tensor_parallel import Columns, How, Plan, Rows, Words
from uneven.policy.apportion import apportion

NUMBER = 4  # bytes of a number in fp32
CUT = {  # which categories a strategy cuts; tensor parallelism cuts all, but not of all params
    "zero1": {"state"},
    "torch-zero1": {"state"},
    "zero2": {"gradients", "state"},
    "fsdp": {"params", "gradients", "state"},
    "torch-fsdp": {"params", "gradients", "state"},
}
BY_LAYERS = ("tensor", "sequence", "torch-tensor")


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds between two steps."""

    params: int
    gradients: int  # with the buffers that they are summed in
    state: int
    other: int = 0  # all other tensors of the process

    @property
    def total(self) -> int:
        return self.params + self.gradients + self.state + self.other


def predict(strategy: str, model: nn.Module, shares: Sequence[float], rank: int) -> Held:
    """What this rank holds with AdamW; `shares` has one number per rank."""
    whole, cut = _params_of(strategy, model, shares, rank)
    part = shares[rank] / sum(shares)
    cuts = CUT.get(strategy, set())

    def held(category: str, numbers: int) -> int:
        if strategy in BY_LAYERS:
            return round(NUMBER * numbers * (whole + cut))
        return round(NUMBER * numbers * whole * (part if category in cuts else 1.0))

    return Held(held("params", 1), held("gradients", 1), held("state", 2))


def uncut(strategy: str, model: nn.Module) -> int:
    """Of what a rank holds, the bytes that every rank holds alike."""
    if strategy in BY_LAYERS:
        return 4 * NUMBER * _params_of(strategy, model, [1.0, 0.0], 1)[0]
    each = {"params": 1, "gradients": 1, "state": 2}
    return NUMBER * count(model) * sum(each[category] for category in each.keys() - CUT.get(strategy, set()))


def predict_muon(
    matrices: Sequence[int], others: int, memory: Sequence[float], speed: Sequence[float], rank: int
) -> Held:
    """MuonAdamW: one number of state for each of the own matrices' numbers, two for the own part of the others.

    Until zero_grad there are the rank's own gradients of all but its matrices.
    """
    owners = assign_tensors(matrices, speed)
    own = sum(size for size, owner in zip(matrices, owners, strict=True) if owner == rank)
    params = sum(matrices) + others
    state = own + 2 * others * memory[rank] / sum(memory)
    return Held(NUMBER * params, NUMBER * (params - own), round(NUMBER * state))


def count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _params_of(strategy: str, model: nn.Module, shares: Sequence[float], rank: int) -> tuple[int, int]:
    """How many params are whole on every rank, and how many more this one has of those that are cut."""
    if strategy not in BY_LAYERS:
        return count(model), 0
    plan: Plan = model.tensor_plan()  # type: ignore[operator]
    whole = cut = 0
    for name, param in model.named_parameters():
        pieces = _pieces_of(name, model, plan)
        if pieces is None:
            whole += param.numel()
        else:
            cut += param.numel() * apportion(pieces, shares)[rank] // pieces
    return whole, cut


def _pieces_of(name: str, model: nn.Module, plan: Plan) -> int | None:
    """Into how many parts (heads, columns) a param can be split; None where every rank holds it whole."""
    owner, _, kind = name.rpartition(".")
    how: How | None = next((how for pattern, how in plan.items() if fnmatch.fnmatchcase(owner, pattern)), None)
    module = model.get_submodule(owner)
    if isinstance(how, Columns):
        return int(module.out_features) // (how.unit * how.parts)  # type: ignore[arg-type]
    if isinstance(how, Rows) and kind == "weight":
        return int(module.in_features) // how.unit  # type: ignore[arg-type]
    return int(module.num_embeddings) if isinstance(how, Words) else None  # type: ignore[arg-type]


def is_whole(name: str, model: nn.Module, strategy: str) -> bool:
    """Whether every rank holds this param as a whole between steps."""
    if strategy in BY_LAYERS:
        return _pieces_of(name, model, model.tensor_plan()) is None  # type: ignore[operator]
    return "params" not in CUT.get(strategy, set())


def measure(strategy: Any, module: nn.Module, optimizer: Optimizer, device: torch.device) -> Held:
    """The storages behind a strategy's params, gradients and state, each counted once, and those of all other tensors.

    What Python does not see, such as the buckets of PyTorch's DDP, it sees by the gradients that are views of them.
    """
    optimizers = list(_optimizers_in(optimizer))
    params = [*module.parameters(), *(p for made in optimizers for group in made.param_groups for p in group["params"])]
    params += [leaf for made in optimizers for leaf in made.state if isinstance(leaf, Tensor)]
    state = [value for made in optimizers for value in _tensors_in(list(made.state.values()), set())]
    attributes = [value for owner in (strategy, *optimizers) for value in vars(owner).values()]
    gradients = [param.grad for param in params if param.grad is not None]
    gradients += _tensors_in([value for value in attributes if type(value).__name__.endswith("Reducer")], set())
    everything = [found for found in gc.get_objects() if _is_tensor(found) and found.device == device]
    seen: set[int] = set()
    of_params, of_state, of_gradients, others = (
        _new_bytes(some, seen) for some in (params, state, gradients, everything)
    )
    return Held(of_params, of_gradients, of_state, others)


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory behind a tensor: of a DTensor its local part, which is all this rank has of it."""
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:
        yield from storages_of(local)
    elif type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.device.type != "meta":
        yield tensor.untyped_storage()


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        for storage in storages_of(tensor):
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), Tensor)  # isinstance would wake lazy modules that gc finds


def _optimizers_in(optimizer: Optimizer) -> Iterator[Optimizer]:
    """An optimizer, and those that it is made of: the one of this rank's piece, one per kind of params."""
    yield optimizer
    for value in vars(optimizer).values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Optimizer):
                yield from _optimizers_in(inner)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that an object of ours or a collection holds; a module's are asked for by other means."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if _is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        for item in [*value.keys(), *value.values()]:
            yield from _tensors_in(item, seen)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors_in(item, seen)
    elif type(value).__module__.startswith("uneven.parallel"):
        for item in vars(value).values() if hasattr(value, "__dict__") else ():
            yield from _tensors_in(item, seen)
