"""Model and optimizer instances given to `fit` in place of functions: each rank rebuilds its own from a deep copy.

Called by launch/run.py before the checks. Invariant: the user's objects are never trained or changed; the result of the
run is its TrainedState, and `state.load_into(model)` gives it to the model. What cannot be rebuilt is refused with the
reason.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.config import Task
from uneven.errors import InputError

AS_FUNCTION = "pass a function that makes it instead"


def rebuild_instances(task: Task) -> tuple[Task, list[str]]:
    """The task with functions in place of instances, and lines to print."""
    model: Any = task.make_model
    optimizer: Any = task.make_optimizer
    if isinstance(optimizer, Optimizer):
        task = replace(task, make_optimizer=_optimizer_template(optimizer, model))
    if not isinstance(model, nn.Module):
        return task, []
    note = "  model: every device trains a copy; the one given stays as it is (state.load_into(model) loads the result)"
    return replace(task, make_model=_model_template(model)), [note]


@dataclass(frozen=True)
class ModelTemplate:
    """Makes copies of a model, with the params that it had when `fit` was called."""

    model: nn.Module

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.model)


class _Place:
    """Stands for the model's param at a position, wherever the template of an optimizer refers to it."""


@dataclass(frozen=True)
class OptimizerTemplate:
    """Makes copies of an optimizer for the params of a copied model, which come in the same order."""

    kind: type[Optimizer]
    attributes: dict[str, Any]
    places: list[_Place]  # of the model's params, in order

    def __call__(self, params: Any) -> Optimizer:
        given = list(params)
        if len(given) != len(self.places):
            raise InputError(
                f"optimizer: an instance for {len(self.places)} params was given and {len(given)} are trained here; "
                "pass optimizer=lambda params: ..."
            )
        memo: dict[int, Any] = {id(place): param for place, param in zip(self.places, given, strict=True)}
        optimizer = self.kind.__new__(self.kind)
        optimizer.__dict__.update(copy.deepcopy(self.attributes, memo))
        for param, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":  # counts stay on the host, as torch keeps them
                    state[key] = value.to(param.device)
        return optimizer


def _model_template(model: nn.Module) -> ModelTemplate:
    try:
        return ModelTemplate(copy.deepcopy(model).cpu())
    except Exception as error:
        raise InputError(
            f"model: this {type(model).__name__} cannot be copied for each device ({_one_line(error)}); "
            f"{AS_FUNCTION}, as in model=lambda: {type(model).__name__}(...)"
        ) from error


def _optimizer_template(optimizer: Optimizer, model: Any) -> OptimizerTemplate:
    kind = type(optimizer).__name__
    example = f"optimizer=lambda params: {kind}(params, lr=...)"
    if not isinstance(model, nn.Module):
        raise InputError(
            f"optimizer: this {kind} holds the params of one model, and model= is a function that makes another: "
            f"pass {example}, or model= the model whose params it holds"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise InputError(
            f"optimizer: a scheduler was made for this {kind}, and it would not be stepped: pass one without, and "
            "scheduler=lambda optimizer: ... to fit"
        )
    params = list(model.parameters())
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    foreign = len(held - {id(param) for param in params})
    if foreign:
        raise InputError(
            f"optimizer: this {kind} holds {foreign} params that are not of the model given, so the model would not be "
            f"trained by it: make it from model.parameters(), or pass {example}"
        )
    places = [_Place() for _ in params]
    memo: dict[int, Any] = {id(param): place for param, place in zip(params, places, strict=True)}
    # A scheduler replaces `step` on the instance by one that steps this very optimizer.
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    try:
        return OptimizerTemplate(type(optimizer), copy.deepcopy(attributes, memo), places)
    except Exception as error:
        raise InputError(
            f"optimizer: this {kind} cannot be copied for each device ({_one_line(error)}); {AS_FUNCTION}: {example}"
        ) from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
