"""The entry points: `fit` in one call, `Ddp.builder` in steps. Both end in `run.launch`.

With one usable device everything is plain training behind the same handle, so a script written today runs
unchanged when a second device is named.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from uneven.config import EvalStep, Evaluation, Settings, Task, TrainStep, resolve
from uneven.errors import InputError
from uneven.run import Run, launch
from uneven.state import TrainedState

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from typing_extensions import Self, Unpack


def fit(
    *,
    model: "Callable[[], nn.Module]",
    optimizer: "Callable[[Any], Optimizer]",
    step: TrainStep,
    dataset: Any,
    scheduler: Callable[..., Any] | None = None,
    evaluate: tuple[Any, EvalStep] | None = None,
    **settings: "Unpack[Settings]",
) -> TrainedState:
    """Train a model and return its state.

    model() makes the model; optimizer(params) its optimizer; step(model, batch) returns the batch's mean
    loss, or (loss_sum, count); scheduler(optimizer) or scheduler(optimizer, total_steps) makes a torch
    scheduler; evaluate is (test_set, eval_step) with eval_step(model, batch) -> (dict of sums, count).

    >>> import torch
    >>> x = torch.linspace(-1, 1, 64).unsqueeze(1)
    >>> state = fit(
    ...     model=lambda: torch.nn.Linear(1, 1),
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
    ...     step=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
    ...     dataset=torch.utils.data.TensorDataset(x, 3 * x),
    ...     batch_size=16, epochs=20, devices="cpu", progress="off",
    ... )
    >>> round(state.params["weight"].item(), 2)
    3.0
    """
    builder = Ddp.builder(model, optimizer, step).dataset(dataset)
    if scheduler is not None:
        builder.scheduler(scheduler)
    if evaluate is not None:
        builder.evaluate(*evaluate)
    return builder.settings(**settings).run().join()


class Ddp:
    """Where training on one or many devices starts."""

    @staticmethod
    def builder(
        make_model: "Callable[[], nn.Module]",
        make_optimizer: "Callable[[Any], Optimizer]",
        train_step: TrainStep,
    ) -> "Builder":
        """Factories first, then one method per setting, then `.run()`."""
        return Builder(make_model, make_optimizer, train_step)


class Builder:
    """Collects settings; nothing is checked and nothing starts before `run()`."""

    def __init__(self, make_model: Any, make_optimizer: Any, train_step: TrainStep) -> None:
        self._factories = (make_model, make_optimizer, train_step)
        self._dataset: Any = None
        self._make_scheduler: Callable[..., Any] | None = None
        self._evaluation: Evaluation | None = None
        self._settings: Settings = {}

    def dataset(self, dataset: Any) -> "Self":
        self._dataset = dataset
        return self

    def scheduler(self, make_scheduler: Callable[..., Any]) -> "Self":
        """make_scheduler(optimizer) or make_scheduler(optimizer, total_steps) -> a torch scheduler."""
        self._make_scheduler = make_scheduler
        return self

    def evaluate(
        self, test_set: Any, eval_step: EvalStep, every: str | int = "epoch", batch_size: int | None = None
    ) -> "Self":
        """Evaluate every epoch or every N epochs, and always after the last; outside the training clock."""
        epochs = 1 if every == "epoch" else every
        if not isinstance(epochs, int) or epochs < 1:
            raise InputError(f"every={every!r} must be 'epoch' or a number of epochs of at least 1")
        self._evaluation = Evaluation(test_set, eval_step, epochs, batch_size)
        return self

    def settings(self, **settings: "Unpack[Settings]") -> "Self":
        """Several settings at once, under the names of `fit`."""
        self._settings.update(settings)
        return self

    def batch_size(self, batch_size: int) -> "Self":
        return self.settings(batch_size=batch_size)

    def epochs(self, epochs: int) -> "Self":
        return self.settings(epochs=epochs)

    num_epochs = epochs

    def policy(self, policy: str) -> "Self":
        return self.settings(policy=policy)

    def backend(self, backend: str) -> "Self":
        return self.settings(backend=backend)

    def devices(self, devices: str) -> "Self":
        return self.settings(devices=devices)

    def seed(self, seed: int) -> "Self":
        return self.settings(seed=seed)

    def accumulate(self, batches: int) -> "Self":
        return self.settings(accumulate=batches)

    def global_batch_size(self, samples: int | None) -> "Self":
        return self.settings(global_batch_size=samples)

    def shares(self, shares: Sequence[float] | None) -> "Self":
        return self.settings(shares=shares)

    def sync_batchnorm(self, is_on: bool = True) -> "Self":
        return self.settings(sync_batchnorm=is_on)

    def max_grad_norm(self, norm: float | None) -> "Self":
        return self.settings(max_grad_norm=norm)

    def precision(self, precision: str) -> "Self":
        return self.settings(precision=precision)

    def compile(self, compile: str) -> "Self":
        return self.settings(compile=compile)

    def workers(self, workers: int) -> "Self":
        return self.settings(workers=workers)

    def checkpoint_every(self, epochs: int | None) -> "Self":
        return self.settings(checkpoint_every=epochs)

    def out(self, folder: str | Path | None) -> "Self":
        return self.settings(out=folder)

    def progress(self, style: str) -> "Self":
        return self.settings(progress=style)

    def run(self) -> Run:
        """Check everything and start; returns at once. `.join()` on the result gives the trained state."""
        task = Task(*self._factories, self._dataset, self._make_scheduler, self._evaluation)
        return launch(task, resolve(cast("dict[str, Any]", self._settings)))
