"""The contract of a pace: how a rank keeps together with the others, from round 0 to the end of the run."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from uneven.data.feed import Micros
from uneven.policy.axis import Part
from uneven.policy.finish import Cost


class Synchronizer(Protocol):
    """How a rank keeps together with the others, from round 0 on."""

    notes: list[str]  # what the user should know, printed once

    @property
    def epoch(self) -> int:
        """Epochs that all ranks have passed."""
        ...

    def meet(self, costs: Sequence[Cost]) -> None:
        """Round 0, after which every rank knows every rank's cost and holds rank 0's values."""
        ...

    def reset_timer(self) -> None:
        """From now on the rank's time is its own work again: called after anything that is not a step."""
        ...

    def parts(self) -> Iterator[Part]:
        """What this rank trains, in order. An empty part only brings it to a boundary, where something is due."""
        ...

    def train(self, part: Part, micros: Micros) -> bool:
        """One part and whatever is due after it; returns whether the run is to stop."""
        ...

    def say(self, word: float) -> list[float]:
        """Meet the others at once for one word from each; see pace/company.py."""
        ...

    def average_buffers(self) -> None:
        """Where all ranks meet, before a state is looked at: afterwards buffers are equal too."""
        ...

    def ratio(self) -> tuple[int, ...]:
        """How much of a common work each rank should take, by speed."""
        ...

    def show(self) -> dict[str, float]:
        """A few numbers for whoever watches; asked from another thread."""
        ...

    def finalize(self) -> None:
        """After the last part: all replicas are equal, buffers included."""
        ...

    def close(self) -> None:
        """The model is the user's alone again."""
        ...
