"""A layered graph layout (in the manner of Sugiyama): the positions of boxes and lines.

It works on sizes alone. Items are on levels from top to bottom; a line that passes a level has a lane of its own there,
and lines bend only between levels, so no line crosses a box (tests/graph/test_draw.py). A frame is laid out from the
inside out. A scene that would be too tall continues in the next column.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from uneven.graph.drawing.scene import Box, Edge, Item, Layout, Line, Point, Scene

PAGE_WIDTH, PAGE_HEIGHT = 1100.0, 1500.0  # a scene is broken into columns to fit this size best
MAX_COLUMNS = 8
MIN_GAIN = 1.1  # by how much another column must improve the fit, since columns are harder to follow
BESIDE = 16.0  # between neighbours of a level
GUTTER = 40.0  # between columns, for the line from one to the next
TURN = 14.0  # how far such a line extends beyond a column
LANE = 10.0  # width of a lane, for lines that pass a level

# Weights that keep lines straight: the stream comes before lines that pass levels, and these before the rest.
STREAM, PASSING, ASIDE, OTHER = 1e6, 1e3, 30.0, 1.0


@dataclass(frozen=True)
class _Link:
    """The segment of an edge between two neighbouring levels; offsets are from the left edges of its cells."""

    upper: str
    lower: str
    weight: float
    upper_offset: float
    lower_offset: float


def arrange(scene: Scene) -> Layout:
    """The layout of a scene in the number of columns that fits a page best."""
    net = _Net(scene)
    layouts = [_Placing(net, columns).layout() for columns in net.ways_to_break()]
    fits = [min(1.0, PAGE_WIDTH / layout.width, PAGE_HEIGHT / layout.height) for layout in layouts]
    return layouts[max(range(len(layouts)), key=lambda number: fits[number] / MIN_GAIN**number)]


class _Net:
    """A scene on its levels: the cells (items or lanes) of each level in their order, and the links between them."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.boxes = {item.name: _unplaced(item) for item in scene.items}  # of items and lanes; not placed yet
        self.level = _levels(scene)
        self.lanes: set[str] = set()
        self.rows: list[list[str]] = [[] for _ in range(max(self.level.values()) + 1)]
        for item in scene.items:
            self.rows[self.level[item.name]].append(item.name)
        self.chains = {
            edge: list(self._chain(edge)) for edge in scene.edges if not edge.is_back
        }  # edge -> its cells from source to target
        self.place: dict[str, int] = {}  # in its row
        self._order_rows()
        self.tips = dict(self._tips())  # where an edge ends, from its target's left edge
        self.below: dict[int, list[_Link]] = defaultdict(list)  # what goes on from each level to the next
        for edge in self.chains:
            for link in self._links(edge):
                self.below[self.level[link.upper]].append(link)
        labelled = [(self.level[edge.source], self.level[edge.target] - 1) for edge in self.chains if edge.label]
        self.labelled = {level for ends in labelled for level in ends}

    def _chain(self, edge: Edge) -> Iterator[str]:
        yield edge.source
        for level in range(self.level[edge.source] + 1, self.level[edge.target]):
            lane = f"lane.{edge.source}.{edge.kind == 'further'}.{level}"  # lines from one source share their lane
            if lane not in self.boxes:
                self.boxes[lane] = Box(Item(lane, LANE, 0.0), 0.0, 0.0, LANE, 0.0, (LANE / 2,), LANE / 2)
                self.lanes.add(lane)
                self.level[lane] = level
                self.rows[level].append(lane)
            yield lane
        yield edge.target

    def _order_rows(self) -> None:
        """Order each row by the mean position of the cells above, so that lines seldom cross; ties: stream first."""
        reached = {*self.scene.entries[:1], *(edge.target for edge in self.chains if edge.kind == "stream")}
        uppers = defaultdict(list)
        for edge, chain in self.chains.items():
            for upper, lower in pairwise(chain):
                if edge.kind != "further" or lower in self.lanes:
                    uppers[lower].append(upper)
        for row in self.rows:
            means = {key: sum(self.place[upper] for upper in uppers[key]) / max(len(uppers[key]), 1) for key in row}
            row.sort(key=lambda key: (means[key], key not in reached))
            self.place.update({key: number for number, key in enumerate(row)})

    def _tips(self) -> Iterator[tuple[Edge, float]]:
        """Where edges end: at a frame's entries; elsewhere the stream in the middle and others beside it, in order."""
        coming: dict[str, list[Edge]] = defaultdict(list)
        for edge in sorted(self.chains, key=lambda edge: self.place[self.chains[edge][-2]]):
            coming[edge.target].append(edge)
        for name, edges in coming.items():
            box = self.boxes[name]
            streams = [number for number, edge in enumerate(edges) if edge.kind == "stream"]
            middle = sum(streams) / len(streams) if streams else (len(edges) - 1) / 2
            for number, edge in enumerate(edges):
                beside = box.entries[0] + box.item.line_gap * (number - middle)
                if edge.kind == "skip" and number > middle and box.item.is_round and self.is_outermost(name, 1):
                    beside = box.entries[0] + box.height / 2
                yield (
                    edge,
                    box.entries[min(edge.place, len(box.entries) - 1)]
                    if box.inside
                    else min(max(beside, 0.0), box.width),
                )

    def is_outermost(self, name: str, side: int) -> bool:
        """Whether there are only lanes beside an item at the right (1) or left (-1)."""
        row, place = self.rows[self.level[name]], self.place[name]
        return self.lanes.issuperset(row[place + 1 :] if side > 0 else row[:place])

    def _links(self, edge: Edge) -> Iterator[_Link]:
        chain = self.chains[edge]
        for number, (upper, lower) in enumerate(pairwise(chain)):
            is_last = number == len(chain) - 2
            # A stream that passes a level yields to the stream that has an item there.
            direct = {"stream": STREAM, "aside": ASIDE}.get(edge.kind, OTHER)
            weight = direct if len(chain) == 2 else OTHER if is_last or not number else PASSING
            end = self.tips[edge] if is_last else self.boxes[lower].entries[0]
            yield _Link(upper, lower, weight, self.boxes[upper].exit, end)

    def ways_to_break(self) -> Iterator[list[range]]:
        """One column, then two and more, as equal in height as possible.

        A column may end only where the lines of a single cell continue. A scene with lines back up has one column.
        """
        many = len(self.rows)
        yield [range(many)]
        sources = [len({link.upper for link in self.below[level]}) for level in range(many)]
        has_back = any(edge.is_back for edge in self.scene.edges)
        cuts = [] if has_back else [level for level in range(2, many - 1) if sources[level - 1] == 1]
        above = list(accumulate((max(self.boxes[key].height for key in row) + 20 for row in self.rows), initial=0.0))
        for columns in range(2, min(MAX_COLUMNS, len(cuts) + 1) + 1):
            ends = set()
            for part in range(1, columns):
                wanted = (
                    above[-1] * (part + 0.05) / columns
                )  # of two equally good cuts the later one, to fill the first column
                ends.add(min(cuts, key=lambda cut: abs(above[cut] - wanted)))
            if len(ends) == columns - 1:
                yield [range(start, end) for start, end in pairwise([0, *sorted(ends), many])]


def _unplaced(item: Item) -> Box:
    if item.scene is None:
        anchor = item.width / 2 if item.anchor is None else item.anchor
        return Box(item, 0.0, 0.0, item.width, item.height, (anchor,), anchor)
    inside = arrange(item.scene)
    width = max(item.width, inside.width + 2 * item.padding)
    inset = (width - inside.width) / 2
    entries = tuple(inset + x for x in inside.entries)
    return Box(item, 0.0, 0.0, width, item.head + inside.height, entries, inset + inside.exit, inside, inset)


def _levels(scene: Scene) -> dict[str, int]:
    """Every item directly below its lowest source; the exits below all others."""
    sources = defaultdict(list)
    for edge in scene.edges:
        if not edge.is_back:
            sources[edge.target].append(edge.source)
    level: dict[str, int] = {}
    for item in scene.items:
        if item.name not in scene.exits:
            level[item.name] = max((level[source] + 1 for source in sources[item.name]), default=0)
    return {**level, **dict.fromkeys(scene.exits, max(level.values()) + 1)}


def _abscissas(net: _Net, column: range) -> dict[str, float]:
    """Left edges without overlaps, such that lines are as straight as their weights demand, the stream exactly."""
    rows = [net.rows[level] for level in column]
    x = {key: 0.0 for row in rows for key in row}
    uppers, lowers = defaultdict(list), defaultdict(list)
    for link in (link for level in column[:-1] for link in net.below[level]):
        uppers[link.lower].append((link.weight, link.upper, link.upper_offset - link.lower_offset))
        lowers[link.upper].append((link.weight, link.lower, link.lower_offset - link.upper_offset))
    for sweep in range(9):
        near, ordered = (uppers, rows) if sweep % 2 == 0 else (lowers, rows[::-1])
        for row in ordered:
            wanted_positions = []
            for key in row:
                most = max((weight for weight, _, _ in (*uppers[key], *lowers[key])), default=OTHER)
                places = [(x[other] + offset, 1.0) for weight, other, offset in near[key] if weight == most]
                wanted_positions.append((_median(places) if places else x[key], most, net.boxes[key].width))
            x.update(zip(row, _spaced(wanted_positions), strict=True))
    left = min(x.values())
    return {key: round(value - left, 2) for key, value in x.items()}


def _spaced(wanted_positions: Sequence[tuple[float, float, float]]) -> list[float]:
    """Positions for (wanted position, weight, width) side by side in this order, with the least weighted sum of moves.

    Absolute distances, unlike least squares, leave one cell exactly where it wants to be, so its line is straight.
    """
    pools: list[
        list[tuple[float, float]]
    ] = []  # of neighbours that touch: (position wanted for the first of them, weight)
    offsets = [0.0]
    for wanted, weight, width in wanted_positions:
        pool = [(wanted - offsets[-1], weight)]
        offsets.append(offsets[-1] + width + BESIDE)
        while pools and _median(pools[-1]) > _median(pool):
            pool = pools.pop() + pool
        pools.append(pool)
    starts = [_median(pool) for pool in pools for _ in pool]
    return [start + offset for start, offset in zip(starts, offsets, strict=False)]


def _median(weighted: Sequence[tuple[float, float]]) -> float:
    ordered = sorted(weighted)
    sums = list(accumulate(weight for _, weight in ordered))
    low, high = bisect_left(sums, sums[-1] / 2), bisect_right(sums, sums[-1] / 2)
    return (ordered[low][0] + ordered[high][0]) / 2


class _Placing:
    """A net in columns: the positions of its levels and cells, and the lines between them."""

    def __init__(self, net: _Net, columns: Sequence[range]) -> None:
        self._net = net
        many = len(net.rows)
        self._top, self._bottom, self._gutter, self._column = [0.0] * many, [0.0] * many, [0.0] * many, [0] * many
        x: dict[str, float] = {}
        self._left = self._right = sum(_back_width(edge) for edge in net.scene.edges if edge.kind == "again")
        for number, column in enumerate(columns):
            left = self._right + GUTTER if number else self._left
            own = _abscissas(net, column)
            x.update({key: left + place for key, place in own.items()})
            self._right = max(x[key] + net.boxes[key].width for key in own)
            y = 2 * TURN if number else 0.0
            for level in column:
                self._top[level], self._column[level], self._gutter[level] = y, number, left - GUTTER / 2
                self._bottom[level] = y + max(net.boxes[key].height for key in net.rows[level])
                y = self._bottom[level] + self._gap(level, x)
        self._height = max(self._bottom[column[-1]] + 2 * TURN * (column is not columns[-1]) for column in columns)
        if self._top[-1] == self._bottom[-1]:  # a port, which is at the lower edge of its frame
            self._top[-1] = self._bottom[-1] = self._height
        self._boxes: dict[str, Box] = {}
        for key, box in net.boxes.items():
            level = net.level[key]
            room = self._bottom[level] - self._top[level] - box.height
            down = 0.0 if level == 0 else room if level == many - 1 else room / 2
            self._boxes[key] = replace(box, x=x[key], y=self._top[level] + down)

    def _gap(self, level: int, x: dict[str, float]) -> float:
        """The space below a level: more if lines go far to the side or if a line has a label."""
        net = self._net
        below = [link for link in net.below[level] if link.lower in x]
        bent = [link for link in below if not _is_from_side(net.boxes[link.lower], link.lower_offset)]
        bends = [abs(x[link.upper] + link.upper_offset - x[link.lower] - link.lower_offset) for link in bent]
        ends = [net.boxes[key] for link in below for key in (link.upper, link.lower)]
        is_seamless = any(box.inside and not box.item.head for box in ends)  # a frame that is not drawn
        least = 2.0 if is_seamless else 14.0 if level in (0, len(net.rows) - 2) else 16.0
        return least + min(0.1 * max(bends, default=0.0), 20.0) + 14.0 * (level in net.labelled)

    def layout(self) -> Layout:
        """The boxes of the scene and its lines; lines back up run beside all boxes."""
        scene, lines = self._net.scene, [self._line_down(edge) for edge in self._net.chains]
        left, right = self._left, self._right
        for edge in (edge for edge in scene.edges if edge.is_back):
            is_right = edge.kind == "state"
            lines.append(self._line_back(edge, right + 12.0 if is_right else left - 12.0, 1 if is_right else -1))
            left, right = (left, right + _back_width(edge)) if is_right else (left - _back_width(edge), right)
        boxes = tuple(self._boxes[item.name] for item in scene.items)
        *entries, end = (self._boxes[name].x + self._boxes[name].exit for name in (*scene.entries, scene.exits[0]))
        return Layout(right, self._height, boxes, tuple(lines), tuple(entries), end)

    def _line_down(self, edge: Edge) -> Line:
        net, source, target = self._net, self._boxes[edge.source], self._boxes[edge.target]
        tip, radius = net.tips[edge], target.height / 2
        x = source.x + source.exit
        points = [(x, source.y + source.height)]
        for upper, lower in pairwise(net.chains[edge]):
            above, below = net.level[upper], net.level[lower]
            low, high, gutter = self._bottom[above], self._top[below], self._gutter[below]
            if lower == edge.target and _is_from_side(target, tip):
                break
            to = self._boxes[lower].x + (tip if lower == edge.target else self._boxes[lower].exit)
            turns = [(x, low + TURN), (gutter, low + TURN), (gutter, high - TURN), (to, high - TURN)]
            points += turns if self._column[above] != self._column[below] else [(x, low), (to, high)]
            x = to
        end = target.y
        if target.item.is_round:
            end += radius - math.sqrt(max(radius**2 - (tip - target.entries[0]) ** 2, 0.0))
        points += [(x, end), (target.x + tip, end)]
        label = (points[0][0], points[0][1] + 20.0) if edge.kind == "further" else (x, end)
        return Line(edge, tuple(points), (label[0] + 5.0, label[1] - 6.0))

    def _line_back(self, edge: Edge, lane: float, side: int) -> Line:
        """A line from the side of a box up to the side of another, through the gaps between levels past neighbours."""
        source, target = self._boxes[edge.source], self._boxes[edge.target]
        apart = 5.0 if source is target and source.height <= 30 else 0.0
        low = source.y + source.height - min(13.0, source.height / 2) + apart
        high = target.y + min(13.0, target.height / 2) - apart
        start = self._path_to_lane(source, low, source.y + source.height, 8.0, lane, side)
        end = self._path_to_lane(target, high, target.y, -8.0, lane, side)
        text = lane + 6.0 if side > 0 else lane - 6.0 - edge.label_width
        return Line(edge, (*start, *end[::-1]), (text, (start[-1][1] + end[-1][1]) / 2 + 4.0))

    def _path_to_lane(self, box: Box, y: float, edge_y: float, beyond: float, lane: float, side: int) -> list[Point]:
        level = self._net.level[box.item.name]
        if self._net.is_outermost(box.item.name, side):
            return [(box.x + (box.width if side > 0 else 0.0), y), (lane, y)]
        gap_y = (self._bottom[level] if beyond > 0 else self._top[level]) + beyond
        x = box.x + box.exit + side * 8.0
        return [(x, edge_y), (x, gap_y), (lane, gap_y)]


def _back_width(back: Edge) -> float:
    return 18.0 + back.label_width


def _is_from_side(box: Box, tip: float) -> bool:
    """Whether a line ends at the right side of a ring."""
    return box.item.is_round and tip >= box.entries[0] + box.height / 2
