"""TensorParallel: single layers are cut among ranks, which work on the same samples together. Columns by share.

A plan says which layers are cut and how, by the names of modules: a linear layer by its outputs (`Columns`) or inputs
(`Rows`), an embedding by its words (`Words`). Columns come first, then rows around whatever works on each column by
itself; attention is cut by heads (`unit` is a head's width). What the plan does not name is whole on every rank.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from uneven.comm.group import Group
from uneven.parallel.pieces import checked_shares
from uneven.parallel.sequence_functions import SharedRows
from uneven.parallel.strategy import (
    FullState,
    MakeOptimizer,
    gradients_of,
    held_by_name,
    on_host,
    scale_all,
    scale_to_norm,
    start_alike,
    whole_state,
)
from uneven.parallel.tensor_functions import join_last
from uneven.parallel.tensor_layers import ColumnLinear, RowLinear, VocabularyEmbedding, keep_own_rows
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
    """A module that is whole and makes rows of a sequence: with sequence parallelism each rank keeps its own."""


How = Columns | Rows | Words | Places
Plan = Mapping[str, How]


@dataclass(frozen=True)
class Slicing:
    """Which part of a dense param each rank holds: along `dim`, of each of `parts` the range that `cut` says."""

    dim: int
    parts: int
    cut: tuple[int, ...]

    def take(self, dense: Tensor, rank: int) -> Tensor:
        """A copy: what it is taken from may be changed, or belong to somebody."""
        size = self.cut[rank + 1] - self.cut[rank]
        by_part = dense.unflatten(self.dim, (self.parts, self.cut[-1]))
        own: Tensor = by_part.narrow(self.dim + 1, self.cut[rank], size).flatten(self.dim, self.dim + 1)
        return own.clone(memory_format=torch.contiguous_format)

    def join(self, own: Tensor, group: Group) -> Tensor:
        size = self.cut[group.rank + 1] - self.cut[group.rank]
        by_part = own.unflatten(self.dim, (self.parts, size)).movedim(self.dim + 1, -1)
        whole = join_last(by_part.contiguous(), self.cut, group)
        return whole.movedim(-1, self.dim + 1).flatten(self.dim, self.dim + 1).contiguous()


class TensorParallel:
    """All ranks must be given the same batches. `shares` says how much of each layer a rank holds and computes."""

    _rows: SharedRows | None = None  # with sequence parallelism: who has which rows between the cut layers

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        group: Group,
        *,
        plan: Plan,
        shares: Sequence[float] | None = None,
    ) -> None:
        self._shares = checked_shares(shares, group)
        start_alike(model, group)
        self._group = group
        self._slicings: dict[Tensor, Slicing] = {}
        self._cut_params: dict[nn.Parameter, nn.Parameter] = {}  # dense -> own, so that tied ones stay tied
        self.module = model
        for name, module in list(model.named_modules()):
            how = next((how for pattern, how in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
            if how is not None:
                parent = model.get_submodule(name.rpartition(".")[0])
                cut = self._cut(name, module, how)
                if cut is not module:
                    setattr(parent, name.rpartition(".")[2], cut)
        self._cut_params.clear()  # they would keep the whole model
        if not self._slicings:
            raise ValueError(f"the plan {dict(plan)} names no module of the model")
        self.optimizer = make_optimizer(model.parameters())

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing changes inside: gradients of what a rank holds are whole as they are."""
        return nullcontext()

    def sit_out(self) -> None:
        raise RuntimeError("ranks of one tensor-parallel group work on the same samples: none can sit out")

    def scale(self, factor: Tensor) -> None:
        scale_all(gradients_of(self.module), factor)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """By the norm over the whole model: what is cut is summed over ranks, what all hold counts once."""
        params = [param for param in self.module.parameters() if param.grad is not None]
        square = torch.zeros(2, dtype=torch.float64, device=params[0].device)
        for param in params:
            assert param.grad is not None
            square[int(param in self._slicings)] += param.grad.double().square().sum()
        cut = self._group.all_reduce(square[1:].clone()).wait()
        norm = (square[0] + cut[0]).sqrt()
        scale_to_norm(gradients_of(self.module), norm, max_norm)
        return norm

    @torch.no_grad()
    def full_state(self) -> FullState:
        model = whole_state(self.module, lambda param: self._joined(param, param))
        state = self.optimizer.state_dict()
        params = [param for one in self.optimizer.param_groups for param in one["params"]]
        whole = {
            place: {key: self._joined(params[place], value) for key, value in found.items()}
            for place, found in state["state"].items()
        }
        return FullState(model, {"state": whole, "param_groups": on_host(state["param_groups"])})

    @torch.no_grad()
    def load_full_state(self, state: FullState) -> None:
        for key, one in held_by_name(self.module, state.model).items():
            one.copy_(self._own(one, state.model[key]))
        params = [param for one in self.optimizer.param_groups for param in one["params"]]
        own = {
            place: {key: self._own(params[place], value) for key, value in found.items()}
            for place, found in state.optimizer["state"].items()
        }
        self.optimizer.load_state_dict({"state": own, "param_groups": on_host(state.optimizer["param_groups"])})

    def close(self) -> None:
        """The model keeps its cut layers: whole ones would not fit where they were cut for memory."""

    def _cut(self, name: str, module: nn.Module, how: How) -> nn.Module:
        if isinstance(how, Places):
            if self._rows is not None:
                keep_own_rows(module, self._rows)
            return module
        if isinstance(how, Words):
            if not isinstance(module, nn.Embedding) or module.padding_idx is not None or module.max_norm is not None:
                raise ValueError(f"{name}: only a plain nn.Embedding can be cut by words")
            cut = self._cut_of(name, module.num_embeddings, 1, 1)
            return VocabularyEmbedding(self._sliced(module.weight, Slicing(0, 1, cut)), cut, self._group, self._rows)
        if not isinstance(module, nn.Linear):
            raise ValueError(f"{name}: only nn.Linear can be cut by columns or rows, not {type(module).__name__}")
        if isinstance(how, Rows):
            cut = self._cut_of(name, module.in_features, how.unit, 1)
            return RowLinear(self._sliced(module.weight, Slicing(1, 1, cut)), module.bias, self._group, self._rows)
        cut = self._cut_of(name, module.out_features, how.unit, how.parts)
        if how.gathers and how.parts > 1:
            raise ValueError(f"{name}: columns of several parts cannot be gathered")
        slicing = Slicing(0, how.parts, cut)
        bias = None if module.bias is None else self._sliced(module.bias, slicing)
        weight = self._sliced(module.weight, slicing)
        return ColumnLinear(weight, bias, cut, self._group, gathers=how.gathers, rows=self._rows)

    def _cut_of(self, name: str, size: int, unit: int, parts: int) -> tuple[int, ...]:
        if size % (unit * parts):
            raise ValueError(f"{name}: {size} cannot be cut into {parts} x units of {unit}")
        return tuple(unit * place for place in cut_by(apportion(size // (unit * parts), self._shares)))

    def _sliced(self, dense: Tensor, slicing: Slicing) -> nn.Parameter:
        assert isinstance(dense, nn.Parameter)
        if dense not in self._cut_params:
            own = nn.Parameter(slicing.take(dense.detach(), self._group.rank), dense.requires_grad)
            self._cut_params[dense] = own
            self._slicings[own] = slicing
        own = self._cut_params[dense]
        if self._slicings[own] != slicing:
            raise ValueError("a param that two layers share must be cut in the same way in both")
        return own

    def _joined(self, param: nn.Parameter, value: Any) -> Any:
        """A param, or state of its shape, as it was before it was cut."""
        if not isinstance(value, Tensor):
            return value
        slicing = self._slicings.get(param)
        is_cut = slicing is not None and value.shape == param.shape
        return slicing.join(value.detach(), self._group).cpu() if slicing and is_cut else on_host(value)

    def _own(self, param: Tensor, value: Any) -> Any:
        slicing = self._slicings.get(param)
        if slicing is None or not isinstance(value, Tensor) or value.dim() != param.dim():
            return on_host(value)
        return slicing.take(value, self._group.rank)
