"""The data of a drawing: a Scene of items and edges before the layout, a Layout of boxes and lines after it.

draw.py makes scenes, layout.py turns them into layouts; svg.py writes layouts, dot.py writes scenes. Sizes are in px.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Item:
    """A box that is not placed yet. With a scene it is a frame around it, and its size is a minimum."""

    name: str  # unique in its scene
    width: float
    height: float
    content: object = None
    anchor: float | None = None  # x where lines begin and end, from its left edge; None: the middle
    line_gap: float = 0.0  # distance between the ends of neighbouring incoming lines
    is_round: bool = False
    scene: "Scene | None" = None
    head: float = 0.0  # height of a frame's title
    padding: float = 0.0


EdgeKind = Literal["stream", "skip", "aside", "further", "again", "state"]


@dataclass(frozen=True)
class Edge:
    """A line that is not placed yet.

    `kind` is "stream", "skip", "aside" (fork) or "further" (extra input) for lines that go down, "again" (next pass of
    a loop) for lines back up at the left and "state" (state across calls) for lines back up at the right. `place` is
    the number of the frame's entry at which it ends.
    """

    source: str
    target: str
    kind: EdgeKind = "stream"
    place: int = 0
    label: str = ""
    title: str = ""
    label_width: float = 0.0  # used only for lines that go back up

    @property
    def is_back(self) -> bool:
        return self.kind in ("again", "state")


@dataclass(frozen=True)
class Scene:
    """Items in topological order of the edges that go down; entries are at the top, exits at the bottom."""

    items: tuple[Item, ...]
    edges: tuple[Edge, ...]
    entries: tuple[str, ...]
    exits: tuple[str, ...]


@dataclass(frozen=True)
class Box:
    """A placed item. `entries` and `exit` are the x where lines end and begin, from its left edge."""

    item: Item
    x: float
    y: float
    width: float
    height: float
    entries: tuple[float, ...]
    exit: float
    inside: "Layout | None" = None
    inset: float = 0.0  # x of the inside from the left edge; its top is below the head


Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """The points of an edge: vertical and horizontal segments, and oblique ones between levels, drawn as curves."""

    edge: Edge
    points: tuple[Point, ...]
    label: Point  # the start of its label


@dataclass(frozen=True)
class Layout:
    """Boxes and lines of one scene, relative to its upper left corner."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]
    entries: tuple[float, ...]
    exit: float
