"""An entry of the history: what is known of an epoch, or up to an event inside one, before it is evaluated."""

from typing import Any

from uneven.train.engine import Engine

Mark = tuple[int, float]  # (slots, training seconds) at an entry


def make_entry(
    engine: Engine, before: Mark, now_s: float, loss: float, *, epoch: int, first: int, until: int, step: int | None
) -> dict[str, Any]:
    """The entry of `epoch`, or at slot `step` in it; its speed is that since the entry `before`.

    Where loss and speed are known only over several epochs, from `first` to that of slot `until`, it says so in
    "epochs".
    """
    axis, (slots, seconds) = engine.axis, before
    slot, last = axis.epoch_end(epoch) if step is None else step, axis.slot(until - 1).epoch
    skipped = {} if step is not None else dict(engine.skipped)
    samples = axis.samples_before(until) - axis.samples_before(slots) - skipped.get(epoch, 0)
    return {
        "epoch": epoch + 1,
        "step": slot,
        **({} if step is None else {"is_inside_epoch": True}),
        **({"epochs": [first + 1, last + 1]} if last > first else {}),
        "samples": engine.samples_before(slot),
        **({"skipped": skipped[epoch]} if epoch in skipped else {}),
        "train_loss": loss,
        "lr": engine.schedule.first_rate,
        "train_seconds": now_s,
        "samples_per_s": samples / max(now_s - seconds, 1e-9),
    }
