"""The memory of a rank under a strategy: predicted by a formula, and measured, between steps and at its peak.

The formula, in fp32, for P params with AdamW on a rank with the share f: params 4 P bytes, gradients 4 P, optimizer
state 8 P; of what a strategy shards, the rank holds f times as much. Frozen params have neither gradients nor state.
Activations are not part of it. `measure` counts storages between two steps, LiveBytes counts them during a step. Used
by rank.py and measure.py.
"""

import fnmatch
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uneven.parallel.flat_shards import assign_tensors
from uneven.parallel.tensor_parallel import Columns, How, Plan, Rows, Words
from uneven.policy.apportion import apportion
from uneven.policy.redundancy import copy_ring, shares_with_copies
from uneven.policy.redundancy import held as held_shares

Category = Literal["params", "gradients", "state"]

ELEMENT_BYTES = 4  # fp32
ELEMENTS_PER_PARAM: dict[Category, int] = {"params": 1, "gradients": 1, "state": 2}  # of AdamW
SHARDED_CATEGORIES: dict[str, set[Category]] = {  # of all params
    "zero1": {"state"},
    "zero1-flat": {"state"},
    "torch-zero1": {"state"},
    "zero2": {"gradients", "state"},
    "fsdp": {"params", "gradients", "state"},
    "torch-fsdp": {"params", "gradients", "state"},
}
SHARDED_BY_LAYER = ("tensor", "sequence", "torch-tensor")  # all categories, but only of the layers in the plan
PLAIN_TENSORS = (Tensor, nn.Parameter)


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


def predict(strategy: str, model: nn.Module, shares: Sequence[float], rank: int, redundancy: int = 0) -> Held:
    """What this rank holds with AdamW; `shares` has one number per rank.

    With redundancy every rank also holds the shard that it keeps a copy of: all shares together are 2.
    """
    share = shares[rank] / sum(shares)
    if redundancy:
        copies = copy_ring(shares)
        share = held_shares(shares_with_copies(shares, copies), copies)[rank]
    sharded_categories = SHARDED_CATEGORIES.get(strategy, set())

    def held(category: Category) -> int:
        elements = ELEMENTS_PER_PARAM[category]
        replicated, sharded = _split_params(strategy, model, shares, rank, only_trained=category != "params")
        if strategy in SHARDED_BY_LAYER:
            return round(ELEMENT_BYTES * elements * (replicated + sharded))
        return round(ELEMENT_BYTES * elements * replicated * (share if category in sharded_categories else 1.0))

    return Held(held("params"), held("gradients"), held("state"))


def replicated_bytes(strategy: str, model: nn.Module) -> int:
    """The bytes that every rank holds in full, whatever its share."""
    if strategy in SHARDED_BY_LAYER:
        replicated, _ = _split_params(strategy, model, [1.0, 0.0], 1)
        return sum(ELEMENTS_PER_PARAM.values()) * ELEMENT_BYTES * replicated
    categories = ELEMENTS_PER_PARAM.keys() - SHARDED_CATEGORIES.get(strategy, set())
    counts = {category: count_params(model, only_trained=category != "params") for category in categories}
    return ELEMENT_BYTES * sum(ELEMENTS_PER_PARAM[category] * count for category, count in counts.items())


def predict_muon(
    matrices: Sequence[int], others: int, memory: Sequence[float], speed: Sequence[float], rank: int
) -> Held:
    """MuonAdamW: one element of state per element of this rank's matrices, two per element of its share of the others.

    `matrices` are the sizes of all matrices, `others` is the number of all other elements. Until zero_grad a rank also
    holds its gradients of everything but its own matrices.
    """
    owners = assign_tensors(matrices, speed)
    own = sum(size for size, owner in zip(matrices, owners, strict=True) if owner == rank)
    params = sum(matrices) + others
    state = own + 2 * others * memory[rank] / sum(memory)
    return Held(ELEMENT_BYTES * params, ELEMENT_BYTES * (params - own), round(ELEMENT_BYTES * state))


def count_params(model: nn.Module, *, only_trained: bool = False) -> int:
    return sum(param.numel() for param in model.parameters() if param.requires_grad or not only_trained)


def _split_params(
    strategy: str, model: nn.Module, shares: Sequence[float], rank: int, *, only_trained: bool = False
) -> tuple[int, int]:
    """The number of params outside sharded layers, and this rank's number of those inside them."""
    if strategy not in SHARDED_BY_LAYER:
        return count_params(model, only_trained=only_trained), 0
    plan: Plan = model.tensor_plan()  # type: ignore[operator]
    replicated = sharded = 0
    for name, param in model.named_parameters():
        if only_trained and not param.requires_grad:
            continue
        units = _count_units(name, model, plan)
        if units is None:
            replicated += param.numel()
        else:
            sharded += param.numel() * apportion(units, shares)[rank] // units
    return replicated, sharded


def _count_units(name: str, model: nn.Module, plan: Plan) -> int | None:
    """How many units (heads, columns, words) of a param can be given to ranks; None if every rank holds all of it."""
    owner, _, kind = name.rpartition(".")
    how: How | None = next((how for pattern, how in plan.items() if fnmatch.fnmatchcase(owner, pattern)), None)
    module = model.get_submodule(owner)
    if isinstance(how, Columns):
        return int(module.out_features) // (how.unit * how.parts)  # type: ignore[arg-type]
    if isinstance(how, Rows) and kind == "weight":
        return int(module.in_features) // how.unit  # type: ignore[arg-type]
    return int(module.num_embeddings) if isinstance(how, Words) else None  # type: ignore[arg-type]


def is_replicated(name: str, model: nn.Module, strategy: str) -> bool:
    """Whether every rank holds all of this param between steps."""
    if strategy in SHARDED_BY_LAYER:
        return _count_units(name, model, model.tensor_plan()) is None  # type: ignore[operator]
    return "params" not in SHARDED_CATEGORIES.get(strategy, set())


def measure(strategy: Any, module: nn.Module, optimizer: Optimizer, device: torch.device) -> Held:
    """The bytes of the storages behind params, gradients, state and all other tensors; each storage is counted once.

    The buckets of PyTorch's DDP are no Python objects; they are counted because gradients are views of them.
    """
    optimizers = list(_optimizers_in(optimizer))
    params = [*module.parameters(), *(p for made in optimizers for group in made.param_groups for p in group["params"])]
    params += [leaf for made in optimizers for leaf in made.state if isinstance(leaf, Tensor)]
    state = [value for made in optimizers for value in _tensors_in(list(made.state.values()), set())]
    attributes = [value for owner in (strategy, *optimizers) for value in vars(owner).values()]
    gradients = [param.grad for param in params if param.grad is not None]
    gradients += _tensors_in([value for value in attributes if type(value).__name__.endswith("Reducer")], set())
    all_tensors = [tensor for tensor in _live_tensors() if tensor.device == device]
    counted: set[int] = set()
    param_bytes, state_bytes, gradient_bytes, other_bytes = (
        _uncounted_bytes(tensors, counted) for tensors in (params, state, gradients, all_tensors)
    )
    return Held(param_bytes, gradient_bytes, state_bytes, other_bytes)


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory behind a tensor; for a DTensor, that of its local shard."""
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:
        yield from storages_of(local)
    elif type(tensor) in PLAIN_TENSORS and tensor.layout == torch.strided and tensor.device.type != "meta":
        yield tensor.untyped_storage()


def _uncounted_bytes(tensors: Iterable[Tensor], counted: set[int]) -> int:
    """The bytes of storages that are not in `counted` yet; adds them to it."""
    total = 0
    for tensor in tensors:
        for storage in storages_of(tensor):
            if storage.nbytes() and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                total += storage.nbytes()
    return total


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), Tensor)  # isinstance would import the lazy modules that gc returns


def _live_tensors() -> Iterator[Tensor]:
    for value in gc.get_objects():
        if _is_tensor(value):
            try:
                _ = value.device
            except RuntimeError:
                continue  # torch 2.8: of one that another thread frees at this moment only the Python object is left
            yield value


def _optimizers_in(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizer and those inside it: a ShardedOptimizer has one, MuonAdamW has one per param group."""
    yield optimizer
    for value in vars(optimizer).values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Optimizer):
                yield from _optimizers_in(inner)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors in a collection or in an object of uneven.parallel; modules are not searched."""
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


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors inside its context; `peak` is the maximum. For the CPU, which has no statistics.

    It follows the storages of every operation's arguments and results with weak references, and counts tensors that
    existed before as well. Sizes are read at every count, because FSDP resizes its buffers. PyTorch's MemTracker is not
    used: it attributes memory to modules and optimizers, and our shards and buckets belong to neither. A tensor that
    only C++ holds is not seen before an operation uses it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._track(_live_tensors())
        self.peak = self._count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN_TENSORS for kind in types):
            return NotImplemented  # a DTensor: its operation on the local tensor is dispatched here next
        result = func(*args, **(kwargs or {}))
        self._track([value for value in tree_leaves((args, kwargs, result)) if _is_tensor(value)])
        self.peak = max(self.peak, self._count())
        return result

    def _track(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for storage in storages_of(tensor):
                known = self._storages.get(storage._cdata)
                if known is None or known() is None:  # an address is used again after its storage was freed
                    self._storages[storage._cdata] = weakref.ref(storage)

    def _count(self) -> int:
        total = 0
        for address, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[address]
            else:
                total += storage.nbytes()
        return total
