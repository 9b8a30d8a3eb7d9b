"""What `Ddp.setup` is given: models, optimizers and schedulers, made or to be made; and settings a loop can follow.

Called by api/fit.py before any rank waits for another. Everything wrong is an InputError here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from uneven.config import REPLICATED, RunConfig
from uneven.errors import InputError
from uneven.step.several import OptimizerGroup

ZERO1 = ("zero1", "zero1-flat")  # they put an optimizer of their own in the place of the user's

MakeOptimizer = Callable[[Any], Optimizer]


def as_module(model: Any) -> nn.Module:
    """The model itself; of several, given as a dict or a list, one module that holds them, in place."""
    parts = model.values() if isinstance(model, Mapping) else model if isinstance(model, list | tuple) else ()
    if parts and all(isinstance(part, nn.Module) for part in parts) and not isinstance(model, nn.Module):
        return nn.ModuleDict(dict(model)) if isinstance(model, Mapping) else nn.ModuleList(model)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model must be the model itself, as in Ddp.setup(Net(), ...), or a dict or list of models, got "
            f"{type(model).__name__}"
        )
    return model


def optimizer_factory(module: nn.Module, optimizer: Any) -> MakeOptimizer:
    """optimizer(params), from a factory, an optimizer of the model's own params, or a dict or list of either."""
    if isinstance(optimizer, Mapping):
        return _several(module, {str(name): value for name, value in optimizer.items()})
    if isinstance(optimizer, list | tuple):
        return _several(module, {str(place): value for place, value in enumerate(optimizer)})
    return _single(module, optimizer, "optimizer")


def _several(module: nn.Module, optimizers: Mapping[str, Any]) -> MakeOptimizer:
    if not optimizers:
        raise InputError("optimizer is empty: pass an optimizer, or several by name")
    parts: dict[str, nn.Module] = {}
    for name, value in optimizers.items():
        part = dict(module.named_children()).get(name)
        if part is None and not isinstance(value, Optimizer):
            names = ", ".join(name for name, _ in module.named_children()) or "none"
            raise InputError(
                f"optimizer {name!r} is a function that makes one, and the model has no part of that name for it (it "
                f"has {names}): give both the same name, as in Ddp.setup({{'g': g, 'd': d}}, {{'g': ..., 'd': ...}})"
            )
        parts[name] = module if part is None else part
    factories = {name: _single(module, value, f"optimizer {name!r}") for name, value in optimizers.items()}

    def make(params: Any) -> Optimizer:
        del params  # each part has its own
        return OptimizerGroup({name: factories[name](parts[name].parameters()) for name in factories})

    return make


def _single(module: nn.Module, optimizer: Any, what: str) -> MakeOptimizer:
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise InputError(
                f"{what} must be an optimizer of the model's params, or a function that makes one from params, got "
                f"{type(optimizer).__name__}"
            )
        return optimizer  # type: ignore[no-any-return]
    check_params(module, optimizer, what)

    def make(params: Any) -> Optimizer:
        del params
        if any(isinstance(value, Tensor) for state in optimizer.state.values() for value in state.values()):
            optimizer.load_state_dict(optimizer.state_dict())  # moves state to where the params are now
        return optimizer

    return make


def check_params(module: nn.Module, optimizer: Optimizer, what: str) -> None:
    """InputError where an optimizer that is made already would not train the model."""
    own = {id(param) for param in module.parameters()}
    trained = [param for settings in optimizer.param_groups for param in settings["params"]]
    foreign = [param for param in trained if id(param) not in own]
    if foreign:
        raise InputError(
            f"{what}={type(optimizer).__name__}(...) holds {len(foreign)} of {len(trained)} params that are not the "
            f"model's (the first has shape {tuple(foreign[0].shape)}): make it from the parameters() of the "
            "model that is given, after every change of the model"
        )
    if not any(param.requires_grad for param in trained):
        raise InputError(f"{what}={type(optimizer).__name__}(...) holds no param that requires a gradient")


def scheduler_factory(scheduler: Any, optimizer: Any, config: RunConfig) -> Callable[..., Any] | None:
    """As `fit` takes it, or a scheduler that was made for the optimizer given."""
    if not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        return scheduler  # type: ignore[no-any-return]
    name = type(scheduler).__name__
    if scheduler.optimizer is not optimizer:
        raise InputError(
            f"scheduler={name}(...) steps another optimizer than the one given; make it from that one, or pass a "
            f"function: scheduler=lambda optimizer: {name}(optimizer, ...)"
        )
    if config.strategy in ZERO1:
        raise InputError(
            f"scheduler={name}(...) with strategy={config.strategy!r}, which replaces the optimizer; pass a function: "
            f"scheduler=lambda optimizer: {name}(optimizer, ...)"
        )
    return lambda _: scheduler


def check_loop(config: RunConfig, size: int, optimizer: Any = None) -> None:
    """InputError for settings that a loop of the user's own cannot follow."""
    if config.compile == "graph":
        raise InputError("compile='graph' with Ddp.setup: a loop of your own cannot be captured; use fit, or 'default'")
    if size > 1 and not config.is_replicated:
        raise InputError(
            f"strategy={config.strategy!r} with Ddp.setup: there devices wait for each other inside forward and "
            f"backward, where a loop of your own may stop; use fit or Ddp.builder, or one of {', '.join(REPLICATED)}"
        )
    is_several = isinstance(optimizer, Mapping | Sequence)
    if size > 1 and is_several and config.strategy in ZERO1:
        raise InputError(f"strategy={config.strategy!r} with several optimizers: it shards one; leave the strategy out")
    if is_several and config.optimizer_state == "average":
        raise InputError("optimizer_state='average' with several optimizers: use 'keep'")
    if config.activations == "auto":
        raise InputError("activations='auto' with Ddp.setup: there is no train step to measure; use 'recompute' or fit")
    if config.global_batch_size == "auto":
        raise InputError("global_batch_size='auto' with Ddp.setup: no step can be measured before yours; pass a number")
    _check_caps(config, size)
    if config.sync_batchnorm and size > 1:
        raise InputError(
            "sync_batchnorm=True with Ddp.setup: BatchNorm is summed over devices in every layer, and a rank without "
            "samples in a step has no batch to run through them; use fit or Ddp.builder"
        )


def _check_caps(config: RunConfig, size: int) -> None:
    """A rank's part of a step is at most `accumulate` batches, so caps can only bound shares that follow the speeds."""
    if config.memory_cap is None:
        return
    if size == 1 or config.policy != "balanced" or config.has_fixed_shares:
        raise InputError(
            f"memory_cap={config.memory_cap!r} with Ddp.setup bounds the shares of policy='balanced' on several "
            "devices; here it would be ignored: leave it out and make batch_size smaller"
        )
    capacity, samples = sum(config.caps(size)), config.slot_size(size)
    if capacity < samples:
        raise InputError(
            f"memory_cap={config.memory_cap!r} holds {capacity:g} of the {samples} samples of a step, and with "
            "Ddp.setup a device's samples of a step count as a whole; make batch_size smaller, or use fit"
        )


def describe_loss(loss: Any) -> str:
    """What the user passed in place of a loss."""
    if isinstance(loss, Tensor):
        return f"a tensor of shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " without a graph")
    return f"a {type(loss).__name__}"
