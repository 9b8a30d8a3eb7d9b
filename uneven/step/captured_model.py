"""What a captured step has as constants of the model: which params are trained, which modules are in training mode.

Host code reads both in an eager step and never in a replay, so that a change after the capture would have no effect,
without a word: both captured forms of a step (graph.py, captured.py) refuse it before a replay.
"""

from torch import nn

from uneven.errors import InputError

ADVICE = (
    "a CUDA graph goes on as it was captured; change it before the run begins, train the second stage in a run of its "
    "own, or use compile='off'"
)


class CapturedModel:
    """Life cycle: made when a step is captured, `check` before every replay."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        self._params = list(model.parameters())
        self._module_names = [name for name, _ in model.named_modules()]
        self._modules = list(model.modules())
        self._are_trained, self._are_training = self._read()

    def check(self) -> None:
        """InputError where a replay would not do what the model says now."""
        are_trained, are_training = self._read()
        if are_trained != self._are_trained:
            place = _first_change(self._are_trained, are_trained)
            what = "unfrozen" if are_trained[place] else "frozen"
            raise InputError(f"compile='graph': {self._names[place]} was {what} while the run is on: {ADVICE}")
        if are_training != self._are_training:
            place = _first_change(self._are_training, are_training)
            name = self._module_names[place] or "the model"
            what = "train" if are_training[place] else "eval"
            raise InputError(f"compile='graph': {name} was put into {what} mode while the run is on: {ADVICE}")

    def _read(self) -> tuple[list[bool], list[bool]]:
        return [param.requires_grad for param in self._params], [module.training for module in self._modules]


def _first_change(before: list[bool], after: list[bool]) -> int:
    return next(place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
