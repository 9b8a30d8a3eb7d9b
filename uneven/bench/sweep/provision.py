"""The data that a sweep needs, brought onto this machine before its first run."""

from collections.abc import Callable
from dataclasses import replace

from uneven.bench.sweep.plan import SweepOrder, plan_sweep
from uneven.data import datasets
from uneven.data.progress import Event
from uneven.errors import InputError, MachineError

STAND_IN = {"shakespeare": "shakespeare-plays"}  # for a quick sweep: another text, which registries have


def provide(order: SweepOrder, say: Callable[[str], None]) -> SweepOrder:
    """Get what is not here. A quick sweep takes another text where the first cannot be had.

    What cannot be had at all is told, and the runs that need it will fail with that reason; the others will not.
    """
    for name in sorted({cell.data for cell in plan_sweep(order)[0]}):
        if _have(name, say):
            continue
        other = STAND_IN.get(name) if order.is_quick else None
        if other is not None and _have(other, say):
            say(f"{other} takes the place of {name}")
            order = replace(order, text=other)
    return order


def _have(name: str, say: Callable[[str], None]) -> bool:
    if any(one.name == name and one.is_here for one in datasets.presence()):
        return True

    def show(event: Event) -> None:
        if event.done is None:  # news, not a count of bytes
            say(event.text)

    try:
        datasets.get(name, progress=show)
    except (InputError, MachineError) as error:
        say(str(error))
        return False
    return True
