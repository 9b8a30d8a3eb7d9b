"""The feed of a loop of the user's own; made by train/engine.py."""

from collections.abc import Iterable, Iterator

from uneven.data.feed import Feed, Inputs, Micros
from uneven.data.tensors import Batch
from uneven.policy.axis import Part


class LoadedFeed:
    """A feed that yields batches in place of inputs: the user's own forward needs them before the step does."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.place = feed.place
        self.lookahead = feed.lookahead

    def stream(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Micros]]:
        for part, micros in self._feed.stream(parts):
            yield part, [(self._feed.open(inputs), samples) for inputs, samples in micros]

    def open(self, inputs: Inputs) -> Batch:
        return inputs

    def in_order(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[Batch, int]]:
        return self._feed.in_order(first, stop)
