"""A model made shard by shard: the user's own make_model() runs as it is, and no rank ever holds all of its params.

`dry_run` runs it without computing params: that gives the model's structure, with params that have no memory, so that a
strategy can shard them. `Blueprint.make` then runs it for real: every operation on a param computes what it would in
one process, and draws the same random numbers. Only the params used last are whole, up to KEPT_BYTES; whatever param
was used longest ago is handed to `put`, from which a strategy takes its shards, and its memory is freed. Where it is
used again, it is made again by a log of the operations that made it (function, arguments, state of the random
generator). So the shards are, bit by bit, what one process would have made.

Called by train/engine.py, train/prepare.py and launch/checks/trial.py for strategy='fsdp'. What is not supported is
told from what is by `dry_run`, which then returns no blueprint: params that were there before, lazy ones, those of
other classes than nn.Parameter or made on another device.
"""

import copy
import ctypes
import hashlib
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from uneven.comm.gather import gather_json
from uneven.comm.group import Group
from uneven.errors import InputError
from uneven.parallel.buckets import is_dense
from uneven.parallel.flat_shards import flat_memory, has_no_memory

KEPT_BYTES = 32 << 20  # of params that are whole at a time; a model of less is made as it is

MOST_COMPARED = 1 << 12  # elements of a param
ROUNDING = 1e-6  # of their sums

Put = Callable[[nn.Parameter, Tensor], None]  # a param of the blueprint's model, and its whole memory, flat
MakeModel = Callable[[], Any]

aten = torch.ops.aten
# What writes every element of its target whatever it held before.
OVERWRITES = frozenset(
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("uniform_", "default"),
        ("normal_", "default"),
        ("zero_", "default"),
        ("fill_", "Scalar"),
        ("fill_", "Tensor"),
        ("copy_", "default"),
        ("random_", "default"),
        ("random_", "from"),
        ("random_", "to"),
        ("bernoulli_", "float"),
        ("exponential_", "default"),
        ("log_normal_", "default"),
        ("cauchy_", "default"),
        ("geometric_", "default"),
    )
)
# What hands out memory without an operation that could be watched.
BESIDE_OPERATIONS = frozenset(
    getattr(Tensor, name) for name in ("numpy", "__array__", "__dlpack__", "tolist", "data_ptr")
)
_ONE_AT_A_TIME = threading.Lock()  # torch's hook, copy's table and the default generator are the whole process's


@dataclass(frozen=True)
class _Operation:
    """What wrote to a param, so that it can be done again: on the same view of its memory, with the same draws."""

    function: Any
    view: tuple[Sequence[int], Sequence[int], int]
    rest: tuple[Any, ...]
    options: dict[str, Any]
    generator: torch.Generator
    drawn_from: Tensor | None  # the state of the generator before

    def repeat(self, param: nn.Parameter) -> None:
        now = None if self.drawn_from is None else self.generator.get_state()
        if self.drawn_from is not None:
            self.generator.set_state(self.drawn_from)
        self.function(param.detach().as_strided(*self.view), *self.rest, **self.options)
        if now is not None:
            self.generator.set_state(now)


class _Made:
    """A param that was registered with a module. `log` is None where it cannot be made again."""

    def __init__(self, number: int, param: nn.Parameter) -> None:
        self.number, self.param = number, param
        self.storage = param.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.log: list[_Operation] | None = None
        self.is_here = True
        self.is_shared = False  # others may read and write its memory: it stays

    def copy_log(self, other: "_Made") -> None:
        self.log = None if other.log is None else list(other.log)

    def write(self, operation: _Operation | None, *, overwrites: bool) -> None:
        """An operation wrote to it; None: one that cannot be repeated."""
        before = [] if overwrites else self.log
        self.log = None if before is None or operation is None else [*before, operation]

    def follow(self) -> int:
        """The module was converted, and has given the param other memory; returns how many bytes more are here."""
        before = self.nbytes if self.is_here else 0
        self.storage = self.param.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.log = None
        self.is_here = True
        return self.nbytes - before

    def allocate(self) -> None:
        self.storage.resize_(self.nbytes)
        self.is_here = True

    def free(self) -> None:
        if self.storage.resizable():
            self.storage.resize_(0)
        else:  # mapped from a file
            remove_memory(self.param)
            self.storage = self.param.untyped_storage()
        self.is_here = False


class _Maker(TorchDispatchMode):
    """Watches every operation while the user's code makes a model. `take` gets a param that is put away, by its number
    in the order of registration; None in a dry run.
    """

    def __init__(
        self, take: Callable[[int, Tensor], None] | None, kept_bytes: int, *, keeps_unrepeatable: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._take = take
        self._kept_bytes = kept_bytes
        self._keeps_unrepeatable = keeps_unrepeatable
        self._thread = threading.get_ident()
        self._is_inside = False  # operations are our own
        self._by_storage: dict[int, _Made] = {}
        self._recent: dict[_Made, None] = {}  # those that are whole, the one used longest ago first
        self._here_bytes = 0
        self._freed_bytes = 0  # since the allocator gave memory back
        self.made: list[_Made] = []
        self.of: dict[nn.Parameter, _Made | None] = {}  # every registered param; None: it stays whole until the end

    @contextmanager
    def watching(self) -> Iterator[None]:
        table: dict[Any, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
        handle = register_module_parameter_registration_hook(self._registered)
        table[nn.Parameter] = self._deepcopy  # a module's copy does not register its params
        try:
            with self, _BesideOperations(self.share):
                yield
        finally:
            del table[nn.Parameter]
            handle.remove()

    def share(self, tensor: Tensor) -> None:
        """Whoever asks gets the memory itself, and may write to it: from now on the param stays whole until the end."""
        if threading.get_ident() == self._thread and (made := self._found(tensor)) is not None:
            self._bring(made)
            made.is_shared = True
            made.log = None

    def put_all_away(self) -> None:
        for made in self.made:
            self._follow(made)
            if made.is_here:
                self._put_away(made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        options: dict[str, Any] = kwargs or {}
        touched = {} if self._is_inside else self._touched((args, options))
        if not touched:
            return func(*args, **options)
        if _is_view(func):
            return self._view(func, args, options, list(touched))
        targets = [self._found(tensor) for tensor in _written(func, args, options)]
        target = targets[0] if len(targets) == 1 and _writes_first(func) else None
        if target is not None and self._take is None:
            return args[0]  # a dry run computes no params
        covers_all = target is not None and func in OVERWRITES and _is_all_of(args[0], target)
        overwrites = covers_all and target is not None and touched[target] == 1  # else it reads itself, too
        for made in touched:
            self._bring(made, is_overwritten=overwrites and made is target)
        operation = None if target is None else self._operation(func, args, options)
        found = func(*args, **options)
        for made in filter(None, targets):
            made.write(operation, overwrites=overwrites)
        self._trim(touched)
        return found

    def _registered(self, module: nn.Module | None, name: str, param: Any) -> None:
        del module, name
        if threading.get_ident() != self._thread or type(param) is not nn.Parameter or param in self.of:
            return
        if param.is_meta:
            return
        storage = param.untyped_storage()
        made = self._by_storage.get(storage._cdata)
        covers_all = param.numel() > 0 and param.nbytes == storage.nbytes() and is_dense(param)
        if made is None and covers_all and param.device.type == "cpu" and param.layout is torch.strided:
            made = _Made(len(self.made), param)
            self.made.append(made)
            self._by_storage[storage._cdata] = made
            self._here_bytes += made.nbytes
        self.of[param] = made
        if made is not None:
            self._trim({made: 1})

    def _deepcopy(self, param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        """As nn.Parameter's own, and the copy is registered; it is made by what made the original."""
        if id(param) in memo:
            known: nn.Parameter = memo[id(param)]
            return known
        found: nn.Parameter = param.__deepcopy__(memo)
        self._registered(None, "", found)
        original, made = self.of.get(param), self.of.get(found)
        if original is not None and made is not None:
            made.copy_log(original)
        return found

    def _touched(self, values: Any) -> dict[_Made, int]:
        """The params among the arguments of an operation, with how often each is there."""
        found: dict[_Made, int] = {}
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and (made := self._found(value)) is not None:
                found[made] = found.get(made, 0) + 1
        return found

    def _found(self, tensor: Tensor) -> _Made | None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return None
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def _view(self, func: Any, args: Any, options: dict[str, Any], touched: Sequence[_Made]) -> Any:
        try:
            return func(*args, **options)
        except RuntimeError:  # some of them look whether the memory is there
            for made in touched:
                self._bring(made)
            return func(*args, **options)

    def _operation(self, func: Any, args: Any, options: dict[str, Any]) -> _Operation | None:
        """None where it takes more than numbers: other tensors are not kept."""
        target, *rest = args
        if any(isinstance(value, Tensor) and value.numel() > 1 for value in tree_leaves((rest, options))):
            return None
        numbers, named = tree_map_only(Tensor, lambda value: value.detach().clone(), (tuple(rest), options))
        generator = options.get("generator") or torch.default_generator
        draws = torch.Tag.nondeterministic_seeded in func.tags
        view = (tuple(target.shape), target.stride(), target.storage_offset())
        return _Operation(func, view, numbers, named, generator, generator.get_state() if draws else None)

    def _bring(self, made: _Made, *, is_overwritten: bool = False) -> None:
        self._recent.pop(made, None)
        self._recent[made] = None
        if made.is_here:
            return
        if self._take is not None and not is_overwritten and made.log is None:
            raise _CannotRepeatError(made.number)
        made.allocate()
        self._here_bytes += made.nbytes
        if is_overwritten:
            return
        with torch.no_grad():
            if self._take is None:
                made.param.detach().zero_()  # what the dry run computes of it means nothing, and is always the same
            for operation in made.log or ():
                operation.repeat(made.param)

    def _trim(self, kept: dict[_Made, int]) -> None:
        for made in kept:
            self._recent.pop(made, None)
            self._recent[made] = None
        for made in list(self._recent):
            if self._here_bytes <= self._kept_bytes:
                break
            if made not in kept and not made.is_shared and not (self._keeps_unrepeatable and made.log is None):
                self._follow(made)
                self._put_away(made)

    def _follow(self, made: _Made) -> None:
        """A module that was converted has given its param other memory."""
        if made.param.untyped_storage()._cdata != made.storage._cdata:
            del self._by_storage[made.storage._cdata]
            self._here_bytes += made.follow()
            self._by_storage[made.storage._cdata] = made

    def _put_away(self, made: _Made) -> None:
        self._is_inside = True
        try:
            with torch.no_grad():
                if self._take is not None:
                    self._take(made.number, flat_memory(made.param.detach()))
                del self._by_storage[made.storage._cdata]
                made.free()
                self._by_storage[made.storage._cdata] = made
        finally:
            self._is_inside = False
        self._here_bytes -= made.nbytes
        self._recent.pop(made, None)
        self._freed_bytes += made.nbytes
        if self._freed_bytes > self._kept_bytes // 2 and self._take is not None:
            _return_freed()
            self._freed_bytes = 0


class _BesideOperations(TorchFunctionMode):
    """Calls `share` with a tensor before its memory is handed out: `param.numpy()` of a freed one ended the process,
    and what was written to the array was lost.
    """

    def __init__(self, share: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._share = share

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in BESIDE_OPERATIONS:
            self._share(args[0])
        return func(*args, **(kwargs or {}))


class _CannotRepeatError(Exception):
    """A param was put away, is read again, and cannot be made again."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(eq=False, repr=False)  # reading a param without memory would end the process
class Blueprint:
    """A model whose params have no memory yet, and how to make them. `model` is the one to train.

    Life cycle: `dry_run` makes it; once a strategy has sharded the model, `make` fills it, once.
    """

    model: nn.Module
    make_model: MakeModel
    numbers: dict[int, nn.Parameter]  # by the order of registration
    at_the_end: dict[int, nn.Parameter]  # by their place in the model: those that are put away last
    kept_bytes: int
    sums: dict[str, float] = field(default_factory=dict)  # of absolute values of each param, once it is made
    random_state: str = ""  # after the model was made
    # A param that was read after it was put away, by what cannot be done again (`.double()` after `orthogonal_`): then
    # the model is made once more, and all that are like it stay whole until the end.
    unrepeatable: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(param.nbytes for param in self.model.parameters())

    def make(self, seed: Callable[[], None], put: Put) -> None:
        """Make all params, after `seed`, and give the model's buffers their values. InputError where it cannot be."""
        names = {param: name for name, param in self.model.named_parameters()}

        def take(number: int, values: Tensor) -> None:
            param = self.numbers.get(number)
            if param is not None and values.numel() == param.numel():
                self._hand_over(param, names[param], values, put)

        with _ONE_AT_A_TIME:
            try:
                maker, model = self._run(seed, _Maker(take, self.kept_bytes))
            except _CannotRepeatError as error:
                param = self.numbers.get(error.number)
                self.unrepeatable = None if param is None else names[param]
                maker, model = self._run(seed, _Maker(take, self.kept_bytes, keeps_unrepeatable=True))
            self.random_state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]
        found = list(model.parameters())
        if any(param not in maker.of for param in found):
            raise InputError(
                "strategy='fsdp': make_model() returned the same model twice; make a new one each time it is called"
            )
        maker.put_all_away()
        for place, param in self.at_the_end.items():
            self._hand_over(param, names[param], flat_memory(found[place].detach()), put)
        self._compare(model)
        if missing := [name for param, name in names.items() if name not in self.sums]:
            raise InputError(
                f"strategy='fsdp': make_model() did not make {missing[0]} when it was called again; {AGAIN}"
            )
        _take_values(self.model, model)

    def _run(self, seed: Callable[[], None], maker: _Maker) -> tuple[_Maker, nn.Module]:
        seed()
        with maker.watching():
            return maker, self.make_model()

    def compare(self, group: Group) -> None:
        """InputError where the ranks have not made the same params; in place of sending rank 0's to all of them.

        Of unlike processors draws may differ by rounding; every element lies on one rank, so the model is still one.
        """
        found = gather_json(group, [self.random_state, self.sums])
        for rank, (state, sums) in enumerate(found[1:], 1):
            for name in self.sums:
                first, other = found[0][1][name], sums[name]
                if not (math.isclose(first, other, rel_tol=ROUNDING) or first != first):
                    raise InputError(
                        f"strategy='fsdp': make_model() gives {name} other values on rank {rank} than on rank 0 (their "
                        f"sizes add up to {other:g} and {first:g}); make it from the seed and from the same files"
                    )
            if state != found[0][0]:
                raise InputError(
                    f"strategy='fsdp': make_model() draws other random numbers on rank {rank} than on rank 0; it must "
                    "draw the same ones on every rank"
                )

    def _hand_over(self, param: nn.Parameter, name: str, values: Tensor, put: Put) -> None:
        put(param, values)
        self.sums[name] = _sum_of(values)

    def _compare(self, model: nn.Module) -> None:
        there, here = _described(self.model), _described(model)
        for one, other in zip(there, here, strict=False):
            if one != other:
                raise InputError(f"strategy='fsdp': make_model() made '{one}', then '{other}'; {AGAIN}")
        if len(there) != len(here):
            raise InputError(f"strategy='fsdp': make_model() made {len(there)} tensors, then {len(here)}; {AGAIN}")


AGAIN = "it must make the same model each time it is called, and not look at the values of its params"


def dry_run(make_model: MakeModel, kept_bytes: int | None = None) -> Blueprint | None:
    """What make_model() makes, without values; None where the model is better made as it is.

    That is: where it is small, or not made of params that can be put away, or not made at all.
    """
    kept_bytes = KEPT_BYTES if kept_bytes is None else kept_bytes
    maker = _Maker(None, kept_bytes)
    try:
        with _ONE_AT_A_TIME, maker.watching():
            model = make_model()
    except Exception:
        # Not lost: whoever makes the model as it is gets it again, unless params without values have led here.
        return None
    if not isinstance(model, nn.Module):
        return None
    params = list(model.parameters())
    if sum(param.nbytes for param in params) <= kept_bytes or any(param not in maker.of for param in params):
        return None
    if any(param.layout is not torch.strided or not is_dense(param) for param in params):
        return None
    maker.put_all_away()
    numbers = {made.number: param for param in params if (made := maker.of[param]) is not None}
    last = {place: param for place, param in enumerate(params) if maker.of[param] is None}
    for param in last.values():
        remove_memory(param)
    return Blueprint(model, make_model, numbers, last, kept_bytes)


class _NoReads(TorchDispatchMode):
    """Inside, what reads the values of a tensor without memory is an InputError; on a CPU the process would die."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        operation = func.__name__.partition(".")[0]
        if not (_is_view(func) or operation.endswith("_like") or operation.startswith("new_")):
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and has_no_memory(value):
                    raise InputError(
                        "strategy='fsdp': the optimizer reads params when it is made, before they have values; let it "
                        "read them in its first step, or use strategy='zero2'"
                    )
        return func(*args, **(kwargs or {}))


def without_reads(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes something of params, which may have no memory yet."""

    def checked(*args: Any, **options: Any) -> Any:
        with _NoReads():  # type: ignore[no-untyped-call]
            return make(*args, **options)

    return checked


@torch.no_grad()
def remove_memory(param: nn.Parameter, device: torch.device | None = None) -> None:
    """Give the param memory of its own, on this device, and free it."""
    memory = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device or param.device)
    param.data = memory
    memory.untyped_storage().resize_(0)


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """As model.to(device), for params without memory."""
    for param in model.parameters():
        if param.device != device:
            remove_memory(param, device)
    return model.to(device)


def _return_freed() -> None:
    """The C library keeps what lies between shards that stay, and an aligned block does not fit where one of its size
    was: a rank would have most of the model in the end.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _written(func: Any, args: Any, options: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else options.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _writes_first(func: Any) -> bool:
    first = func._schema.arguments[0]
    return first.alias_info is not None and first.alias_info.is_write and str(first.type) == "Tensor"


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _is_all_of(tensor: Tensor, made: _Made) -> bool:
    return tensor.nbytes == made.nbytes and is_dense(tensor)


def _sum_of(values: Tensor) -> float:
    """Of elements all over the param. No checksum of its bits: draws of unlike processors may differ by rounding."""
    sample = values[:: max(1, values.numel() // MOST_COMPARED)]
    return float(sample.abs().to(torch.float64).sum())


def _described(model: nn.Module) -> list[str]:
    params = [
        f"{name} {tuple(p.shape)} {p.stride()} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()
    ]
    return params + [f"{name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]


@torch.no_grad()
def _take_values(model: nn.Module, made: nn.Module) -> None:
    """Whatever a module holds beside its params and is a number or a tensor, as the real run has computed it."""
    for name, buffer in model.named_buffers():
        buffer.copy_(made.get_buffer(name))
    for own, other in zip(model.modules(), made.modules(), strict=True):
        for name, value in vars(other).items():
            if name not in _INTERNAL and _is_plain(value):
                vars(own)[name] = value


_INTERNAL = frozenset(vars(nn.Module()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, bool | int | float | str) or type(value) is Tensor
