"""What a fetch reports while it works: one callback, one kind of event.

The library never prints. A caller that wants a bar or lines passes a `Progress`; the others pass nothing and
get `silent`.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """A line of news (`done` is None), or how many bytes of `text` are done; `total` None is unknown."""

    text: str
    done: int | None = None
    total: int | None = None


Progress = Callable[[Event], None]


def silent(event: Event) -> None:
    """The progress of a caller that did not ask for any."""
    del event
