"""Plain data of a drawing: a Scene of items and edges before the layout, a Layout of boxes and lines after it.

draw.py makes scenes, layout.py turns them into layouts, svg.py writes layouts and dot.py scenes. Sizes are in px.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Item:
    """A box to be placed; with a scene it is a frame around it, and its size is the least it takes."""

    name: str  # unique in its scene
    width: float
    height: float
    content: object = None
    anchor: float | None = None  # where lines meet it, from its left edge; None: in the middle
    line_gap: float = 0.0  # how far apart lines end that come in together
    is_round: bool = False
    scene: "Scene | None" = None
    head: float = 0.0  # height of a frame's title
    padding: float = 0.0


EdgeKind = Literal["stream", "skip", "aside", "further", "again", "state"]


@dataclass(frozen=True)
class Edge:
    """A line to be drawn.

    `kind` is "stream", "skip", "aside" or "further" for lines downwards, "again" for one back up at the left and
    "state" for one back up at the right. `place` says at which of a frame's entries it ends.
    """

    source: str
    target: str
    kind: EdgeKind = "stream"
    place: int = 0
    label: str = ""
    title: str = ""
    label_width: float = 0.0  # counts only beside lines that go back

    @property
    def is_back(self) -> bool:
        return self.kind in ("again", "state")


@dataclass(frozen=True)
class Scene:
    """Items such that every edge downwards goes to a later one; entries stand at the top, exits at the bottom."""

    items: tuple[Item, ...]
    edges: tuple[Edge, ...]
    entries: tuple[str, ...]
    exits: tuple[str, ...]


@dataclass(frozen=True)
class Box:
    """A placed item. Its entries and its exit are where lines meet it, from its left edge."""

    item: Item
    x: float
    y: float
    width: float
    height: float
    entries: tuple[float, ...]
    exit: float
    inside: "Layout | None" = None
    inset: float = 0.0  # where the inside begins, from the left edge; its top is under the head


Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """An edge's way, upright or level but for the pieces between two levels, which are meant as curves."""

    edge: Edge
    points: tuple[Point, ...]
    label: Point  # where its label begins


@dataclass(frozen=True)
class Layout:
    """Boxes and lines of one scene, from its own upper left corner."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]
    entries: tuple[float, ...]
    exit: float
