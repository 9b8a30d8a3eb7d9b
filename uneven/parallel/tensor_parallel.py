"""Tensor and sequence parallelism: single layers are sharded among ranks that train the same samples together.

A plan names the layers that are sharded, by module names, and how: a linear layer by its outputs (`Columns`) or inputs
(`Rows`), an embedding by its words (`Words`). Columns come first, then rows, with elementwise operations between
them; attention is sharded by heads (`unit` is a head's width). What the plan does not name is whole on every rank.
"""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.comm.torch_group import AnyGroup, as_group
from uneven.errors import InputError
from uneven.parallel.buckets import UNLIMITED
from uneven.parallel.elementwise import refuse_by_elements
from uneven.parallel.flat_shards import checked_shares
from uneven.parallel.param_guards import ParamReads
from uneven.parallel.reducer import Reducer
from uneven.parallel.strategy import (
    AnyOptimizer,
    FullState,
    Strategy,
    check_trainable,
    full_model_state,
    gradients_of,
    on_host,
    optimizer_of,
    scale_to_norm,
    square_of,
    sync_initial_state,
    tensors_by_name,
)
from uneven.parallel.tensor_layers import (
    ColumnLinear,
    RowLinear,
    SequenceShards,
    VocabularyEmbedding,
    all_gather_along,
    keep_own_rows,
)
from uneven.policy.apportion import apportion, cut_by


@dataclass(frozen=True)
class Columns:
    """A linear layer's outputs: `parts` of equal size side by side (3 for q, k and v), each in units of `unit`."""

    unit: int = 1
    parts: int = 1
    gathers: bool = False


@dataclass(frozen=True)
class Rows:
    """A linear layer's inputs, in units of `unit`."""

    unit: int = 1


@dataclass(frozen=True)
class Words:
    """An embedding's rows."""


@dataclass(frozen=True)
class Places:
    """A whole module that makes rows of a sequence; with sequence parallelism each rank keeps its own rows."""


How = Columns | Rows | Words | Places
Plan = Mapping[str, How]


@dataclass(frozen=True)
class Sharding:
    """Which part of a dense param each rank holds: along `dim`, the range given by `bounds` of each of `parts`."""

    dim: int
    parts: int
    bounds: tuple[int, ...]

    def shard(self, dense: Tensor, rank: int) -> Tensor:
        """A rank's part, as a copy: the dense tensor may be changed later."""
        size = self.bounds[rank + 1] - self.bounds[rank]
        by_part = dense.unflatten(self.dim, (self.parts, self.bounds[-1]))
        own: Tensor = by_part.narrow(self.dim + 1, self.bounds[rank], size).flatten(self.dim, self.dim + 1)
        return own.clone(memory_format=torch.contiguous_format)

    def unshard(self, own: Tensor, group: Group) -> Tensor:
        size = self.bounds[group.rank + 1] - self.bounds[group.rank]
        by_part = own.unflatten(self.dim, (self.parts, size))
        return all_gather_along(by_part, self.dim + 1, self.bounds, group).flatten(self.dim, self.dim + 1)


class TensorParallel(Strategy):
    """All ranks must be given the same batches. `shares`: how much of each layer a rank holds and computes.

    `group` is a torch process group or one of ours; None is torch's default group. An optimizer that was made before
    gets the sharded params, and its state, in place of the whole ones. `close` leaves the model its sharded layers:
    whole ones may not fit into memory.
    """

    _rows: SequenceShards | None = None  # with sequence parallelism: rows between the sharded layers

    def __init__(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer = None,
        group: AnyGroup = None,
        *,
        plan: Plan,
        shares: Sequence[float] | None = None,
    ) -> None:
        self._group = as_group(group)
        self._shares = checked_shares(shares, self._group)
        check_trainable(model)
        sync_initial_state(model, self._group)
        self._shardings: dict[Tensor, Sharding] = {}
        self._own_params: dict[nn.Parameter, nn.Parameter] = {}  # dense -> own, so that tied ones stay tied
        self.module = model
        if isinstance(optimizer, Optimizer):
            optimizer_of(model, optimizer)  # it must hold this model's params
            refuse_by_elements(optimizer, type(self).__name__)
        for name, module in list(model.named_modules()):
            how = next((how for pattern, how in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
            if how is not None:
                parent = model.get_submodule(name.rpartition(".")[0])
                layer = self._sharded_layer(name, module, how)
                if layer is not module:
                    setattr(parent, name.rpartition(".")[2], layer)
        if not self._shardings:
            raise ValueError(f"the plan {dict(plan)} names no module of the model")
        if isinstance(optimizer, Optimizer):
            self._give_own_params(optimizer)
        self._own_params.clear()  # its keys would keep the dense params in memory
        if optimizer is not None:
            self.use_optimizer(optimizer)

    def backward_without_samples(self) -> None:
        raise RuntimeError("ranks of a tensor-parallel group train the same samples: none can be without samples")

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """By the norm over the whole model: sharded params are summed over ranks, whole ones count once."""
        params = [param for param in self.module.parameters() if param.grad is not None]
        square = torch.zeros(2, dtype=torch.float64, device=params[0].device)
        for param in params:
            assert param.grad is not None
            square[int(param in self._shardings)] += square_of(param.grad)
        sharded = self._group.all_reduce(square[1:].clone()).wait()
        norm = (square[0] + sharded[0]).sqrt()
        scale_to_norm(gradients_of(self.module), norm, max_norm)
        return norm

    @torch.no_grad()
    def check_unsharded_gradients(self) -> None:
        """InputError where a param that is whole has a part of its gradient on each rank. A collective.

        So it is where the param computes between columns and rows, as a norm of each head does: a rank then sees its
        own columns alone, and nobody adds the parts up. Called after the first backward; devices round differently.
        """
        unsharded = [(name, p.grad) for name, p in self.module.named_parameters() if p not in self._shardings]
        norms = gather_rows(self._group, [0.0 if g is None else float(square_of(g).sqrt()) for _, g in unsharded])
        largest = max(map(max, norms), default=0.0)
        for (name, _), of_ranks in zip(unsharded, zip(*norms, strict=True), strict=True):
            if max(of_ranks) - min(of_ranks) > 0.1 * max(of_ranks) and max(of_ranks) > 1e-6 * largest:
                raise InputError(
                    f"strategy='tensor': {name} is whole, but each device has another gradient of it: it computes "
                    "between columns and rows, where a device has its own columns alone; use strategy='sequence', "
                    "which sums them"
                )

    @torch.no_grad()
    def full_params(self) -> dict[str, Tensor]:
        return {name: self._gathered(param, param) for name, param in self.module.named_parameters()}

    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor | None]:
        """Whether a param was used is the same on all ranks: they train the same samples."""
        return {
            name: None if param.grad is None else self._gathered(param, param.grad)
            for name, param in self.module.named_parameters()
        }

    @torch.no_grad()
    def full_state(self) -> FullState:
        model = full_model_state(self.module, lambda param: self._unsharded(param, param))
        state = self.optimizer.state_dict()
        params = [param for settings in self.optimizer.param_groups for param in settings["params"]]
        full_state = {
            place: {key: self._unsharded(params[place], value) for key, value in values.items()}
            for place, values in state["state"].items()
        }
        return FullState(model, {"state": full_state, "param_groups": on_host(state["param_groups"])})

    @torch.no_grad()
    def load_full_state(self, state: FullState) -> None:
        for key, tensor in tensors_by_name(self.module, state.model).items():
            tensor.copy_(self._own_part(tensor, state.model[key]))
        params = [param for settings in self.optimizer.param_groups for param in settings["params"]]
        own = {
            place: {key: self._own_part(params[place], value) for key, value in values.items()}
            for place, values in state.optimizer["state"].items()
        }
        self.optimizer.load_state_dict({"state": own, "param_groups": on_host(state.optimizer["param_groups"])})

    def _applied(self, optimizer: Optimizer) -> Optimizer:
        refuse_by_elements(optimizer, type(self).__name__)
        return optimizer

    def _give_own_params(self, optimizer: Optimizer) -> None:
        """Put the sharded params, and their part of the state, in the place of the whole ones."""
        for dense, own in self._own_params.items():
            if dense in optimizer.state:
                state = optimizer.state.pop(dense)
                optimizer.state[own] = {key: self._own_part(own, value) for key, value in state.items()}
        for settings in optimizer.param_groups:
            settings["params"] = [self._own_params.get(param, param) for param in settings["params"]]

    def _gathered(self, param: nn.Parameter, value: Tensor) -> Tensor:
        """A copy of a param, or of a tensor of its shape, from all ranks' shards, on its device."""
        sharding = self._shardings.get(param)
        return value.detach().clone() if sharding is None else sharding.unshard(value.detach(), self._group)

    def _sharded_layer(self, name: str, module: nn.Module, how: How) -> nn.Module:
        if isinstance(how, Places):
            if self._rows is not None:
                keep_own_rows(module, self._rows)
            return module
        _refuse_what_would_be_lost(name, module)
        if isinstance(how, Words):
            if not isinstance(module, nn.Embedding) or module.padding_idx is not None or module.max_norm is not None:
                raise ValueError(f"{name}: only a plain nn.Embedding can be sharded by words")
            bounds = self._bounds(name, module.num_embeddings, 1, 1)
            own = self._own_param(module.weight, Sharding(0, 1, bounds))
            return VocabularyEmbedding(own, bounds, self._group, self._rows)
        if not isinstance(module, nn.Linear):
            raise ValueError(f"{name}: only nn.Linear can be sharded by columns or rows, not {type(module).__name__}")
        if isinstance(how, Rows):
            bounds = self._bounds(name, module.in_features, how.unit, 1)
            own = self._own_param(module.weight, Sharding(1, 1, bounds))
            return RowLinear(own, module.bias, self._group, self._rows)
        bounds = self._bounds(name, module.out_features, how.unit, how.parts)
        if how.gathers and how.parts > 1:
            raise ValueError(f"{name}: columns of several parts cannot be gathered")
        sharding = Sharding(0, how.parts, bounds)
        bias = None if module.bias is None else self._own_param(module.bias, sharding)
        weight = self._own_param(module.weight, sharding)
        return ColumnLinear(weight, bias, bounds, self._group, gathers=how.gathers, rows=self._rows)

    def _bounds(self, name: str, size: int, unit: int, parts: int) -> tuple[int, ...]:
        if size % (unit * parts):
            raise ValueError(f"{name}: {size} cannot be divided into {parts} x units of {unit}")
        return tuple(unit * place for place in cut_by(apportion(size // (unit * parts), self._shares)))

    def _own_param(self, dense: Tensor, sharding: Sharding) -> nn.Parameter:
        assert isinstance(dense, nn.Parameter)
        if dense not in self._own_params:
            own = nn.Parameter(sharding.shard(dense.detach(), self._group.rank), dense.requires_grad)
            self._own_params[dense] = own
            self._shardings[own] = sharding
        own = self._own_params[dense]
        if self._shardings[own] != sharding:
            raise ValueError("a param that two layers share must be sharded in the same way in both")
        return own

    def _unsharded(self, param: nn.Parameter, value: Any) -> Any:
        """A param, or optimizer state of its shape, from all ranks' shards."""
        if not isinstance(value, Tensor):
            return value
        sharding = self._shardings.get(param)
        is_sharded = sharding is not None and value.shape == param.shape
        return self._gathered(param, value).cpu() if is_sharded else on_host(value)

    def _own_part(self, param: Tensor, value: Any) -> Any:
        sharding = self._shardings.get(param)
        if sharding is None or not isinstance(value, Tensor) or value.dim() != param.dim():
            return on_host(value)
        return sharding.shard(value, self._group.rank)


def _refuse_outside(name: str) -> str:
    return (
        f"strategy='sequence': the train step reads {name} outside of the model's forward, where its gradient would "
        "count once for every device; for a penalty in the loss use the optimizer's weight_decay, or strategy='tensor'"
    )


def _refuse_what_would_be_lost(name: str, module: nn.Module) -> None:
    """ValueError where the plain layer that takes the module's place would not do what the module does."""
    plain = next((kind for kind in (nn.Linear, nn.Embedding) if isinstance(module, kind)), None)
    if plain is not None and (type(module).forward is not plain.forward or is_parametrized(module)):
        raise ValueError(
            f"{name}: a {type(module).__name__} computes in its own way, only a plain {plain.__name__} is "
            "sharded; leave it out of the plan"
        )
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    of_params = ((param._backward_hooks, param._post_accumulate_grad_hooks) for param in module.parameters())
    if any(hooks) or any(map(any, of_params)):
        raise ValueError(
            f"{name}: it has hooks, which would see one device's part; remove them, or leave it out of the plan"
        )


class SequenceParallel(TensorParallel):
    """Tensor parallelism whose activations between the sharded layers are sharded too, by rows of the sequence.

    Norms and residual sums are then computed for this rank's rows only. Their params see some rows each, so a Reducer
    sums their gradients when backward ends. The plan must shard the first layer (`Words`) and the last one (`Columns`);
    what adds something to the sequence, as position embeddings do, is named as `Places`. `row_shares`: how many rows
    each rank has, by default as `shares`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer = None,
        group: AnyGroup = None,
        *,
        plan: Plan,
        shares: Sequence[float] | None = None,
        row_shares: Sequence[float] | None = None,
    ) -> None:
        ranks = as_group(group)
        self._rows = SequenceShards(checked_shares(shares if row_shares is None else row_shares, ranks), ranks)
        super().__init__(model, optimizer, ranks, plan=plan, shares=shares)
        unsharded = [param for param in model.parameters() if param.requires_grad and param not in self._shardings]
        self._reducer = Reducer(unsharded, ranks, UNLIMITED, overlap=False) if unsharded else None

    def check_unsharded_gradients(self) -> None:
        """Nothing: the reducer has summed them."""

    @contextmanager
    def watch_reads(self) -> Iterator[None]:
        """A context for a train step: what reads whole params outside of any module's forward is refused.

        Their gradients are summed over the ranks, since in the model each sees some rows. Outside all see the same.
        """
        calls = [0]  # of modules, that have begun and not ended

        def enter(*_: Any) -> None:
            calls[0] += 1

        def leave(*_: Any) -> None:
            calls[0] -= 1

        def may_be_read(param: nn.Parameter) -> bool:
            return calls[0] > 0 or self._reducer is None or not self._reducer.has(param)

        modules = list(self.module.modules())
        handles = [*(module.register_forward_pre_hook(enter) for module in modules)]
        handles += [module.register_forward_hook(leave) for module in modules]
        try:
            with ParamReads(self.module, may_be_read, _refuse_outside):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
