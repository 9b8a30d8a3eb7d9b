"""What the user's functions make in the script's process, and whether they make the same in the ranks of `fit`.

The ranks import the user's modules anew. A setting that the script has changed there is refused
(data/changed_settings.py); an object is not compared, so that a model or an optimizer may be another one than the
script means. The launcher's trial (launch/checks/trial.py) describes what was made, and rank 0 says where its own
differ. That is no error: a function may ask for the world size, which only a rank knows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from uneven.config import Task

WHY = (
    "the ranks import your modules anew, and an object that the script has changed in one of them is not changed "
    "there; pass it to your functions as an argument, or start the script by uneven run"
)


def describe_model(model: nn.Module) -> dict[str, str]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in tensors}


def describe_optimizer(optimizer: Optimizer) -> dict[str, str]:
    """Its class, and the settings of its groups that are numbers, or several of them."""
    found = {"class": type(optimizer).__name__}
    for place, group in enumerate(optimizer.param_groups):
        where = "" if len(optimizer.param_groups) == 1 else f" of param group {place}"
        found |= {f"{name}{where}": repr(value) for name, value in group.items() if _is_setting(value)}
    return found


def compare_in_rank(task: Task, say: Callable[[Sequence[str]], None]) -> Task:
    """The task, whose functions say where they make something else than the launcher's trial."""
    made = task.made
    if made is None:
        return task

    def make_model() -> nn.Module:
        model = task.make_model()
        say(_differences("the model's", made["model"], describe_model(model)))
        return model

    def make_optimizer(params: Any) -> Optimizer:
        optimizer = task.make_optimizer(params)
        say(_differences("the optimizer's", made["optimizer"], describe_optimizer(optimizer)))
        return optimizer

    return replace(task, make_model=make_model, make_optimizer=make_optimizer)


def _differences(whose: str, there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """One line at most, with the first difference."""
    for name in dict.fromkeys((*there, *here)):
        if there.get(name) != here.get(name):
            one, other = here.get(name, "missing"), there.get(name, "missing")
            return [f"  {whose} {name} is {one} in the ranks and {other} where the script runs: {WHY}"]
    return []


def _is_setting(value: Any) -> bool:
    numbers = value if isinstance(value, tuple | list) else (value,)
    return bool(numbers) and all(isinstance(number, int | float) for number in numbers)
