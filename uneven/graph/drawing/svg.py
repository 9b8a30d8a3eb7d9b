"""The appearance of a drawing: items with their sizes, and a finished layout as SVG.

The file is self-contained: no script, no font, no other file. It has a background and follows the light or dark scheme.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from uneven.graph.drawing.scene import Box, Item, Layout, Line, Point, Scene

LETTER, SMALL, LARGE, BOLD = 11.5, 10.5, 16.0, 1.1  # font sizes, and the factor on widths for bold text
ROW = 18.0
PADDING = 9.0
RADIUS = 11.0  # of a ring
HEAD = 22.0  # of a frame
MARGIN = 22.0  # around the drawing
BEFORE_SHAPE = 12.0
CORNER = 7.0
WIDTHS = (  # of letters, as fractions of the font size
    (" ijlI.,'|\u00a0", 0.34),
    ('frt()[]:;!/\\-"', 0.47),
    ("scvxyzkJ_*?", 0.6),
    ("ABCDEGHKNOPQRSUVXYZ&", 0.79),
    ("mwMW@%<>+=~#^\u00d7\u2026", 1.0),
)
HOTTEST = 0.75  # opacity of the heat colour for the largest share of the time


Look = Literal["card", "ring", "pill", "port", "dot", "turn", "bare", "graph", "loop", "gate", "switch", "map"]


@dataclass(frozen=True)
class RowText:
    """The texts of a node. `name` is empty if the user chose none; `share` is None without a profile."""

    path: str
    lines: tuple[str, ...]
    name: str = ""
    shape: str = ""
    title: str = ""
    ms: str = ""
    share: float | None = None
    has_params: bool = False


NOTHING = RowText("", ())


@dataclass(frozen=True)
class Piece:
    """The content of a box.

    `look` is "card" (rows of a chain), "ring" (a merge), "pill" (an input or output), "port" (where a value enters or
    leaves a frame), "dot" (a port where lines join), "turn" (a dot where a line goes back), the kind of a frame, or
    "bare" (a frame that is not drawn).
    """

    look: Look
    rows: tuple[RowText, ...] = ()


@dataclass(frozen=True)
class Sheet:
    """The texts around a drawing. `hottest` is the largest share of the time, None without a profile."""

    title: str
    subtitle: str
    legend: str = ""
    hottest: float | None = None


def text_width(text: str, size: float = LETTER) -> float:
    """An upper estimate of the width in a sans-serif font: the numbers are those of a wide one."""
    return size * sum(_ems(letter) for letter in text)


def _ems(letter: str) -> float:
    for letters, ems in WIDTHS:
        if letter in letters:
            return ems
    return 0.65 if letter.isascii() else 1.3


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def _columns(rows: Sequence[RowText]) -> tuple[float, float, float]:
    """The x where the texts of a card's rows begin, the x where their shapes end, and the card's width."""
    names = max((text_width(row.name, SMALL) + 8.0 for row in rows if row.name and len(row.lines) == 1), default=0.0)
    ms = max((text_width(row.ms, SMALL) + 10.0 for row in rows if row.ms), default=0.0)
    wide = 0.0
    for row in rows:
        shape = text_width(row.shape, SMALL) + BEFORE_SHAPE if row.shape else 0.0
        if len(row.lines) == 1:
            wide = max(wide, names + text_width(row.lines[0]) + shape)
        else:
            wide = max(wide, text_width(row.name, SMALL) + shape, max(map(text_width, row.lines)) - ms)
    return PADDING + names, PADDING + wide, wide + ms + 2 * PADDING


def _height(row: RowText) -> float:
    return ROW if len(row.lines) == 1 else ROW * (len(row.lines) + 1)


def card(name: str, rows: tuple[RowText, ...]) -> Item:
    height = sum(map(_height, rows)) + 6.0
    return Item(name, _columns(rows)[-1], height, Piece("card", rows), line_gap=26.0)


def ring(name: str, row: RowText) -> Item:
    beside = max(text_width(row.shape, SMALL), text_width(row.ms, SMALL))
    half = max(RADIUS, text_width(row.lines[0]) / 2 + 5.0)
    width = 2 * half + (beside + 6.0 if beside else 0.0)  # texts at the left, since a skip comes in from the right
    return Item(name, width, 2 * RADIUS, Piece("ring", (row,)), width - half, 8.0, is_round=half == RADIUS)


def pill(name: str, row: RowText) -> Item:
    shape = text_width(row.shape, SMALL) + 10.0 if row.shape else 0.0
    return Item(name, text_width(row.lines[0]) * BOLD + shape + 28.0, 26.0, Piece("pill", (row,)))


def port(name: str, row: RowText = NOTHING) -> Item:
    """Where a value enters or leaves a frame; extra inputs have a label."""
    if not row.name:
        return Item(name, 4.0, 0.0, Piece("port", (row,)))
    return Item(name, text_width(row.name, SMALL) + 12.0, 16.0, Piece("port", (row,)), 4.0)


def dot(name: str, look: Look = "dot") -> Item:
    return Item(name, 8.0, 18.0, Piece(look, (NOTHING,)))


def frame(name: str, look: Look, row: RowText, scene: Scene) -> Item:
    if look == "bare":
        return Item(name, 0.0, 0.0, Piece(look, (row,)), scene=scene)
    least = 2 * PADDING + text_width(row.lines[0]) * BOLD + (text_width(row.ms, SMALL) + 20.0 if row.ms else 0.0)
    return Item(name, least, 0.0, Piece(look, (row,)), scene=scene, head=HEAD, padding=14.0)


STYLE = """
text{font-family:"Helvetica Neue",Helvetica,Arial,"Liberation Sans","Segoe UI",sans-serif;font-size:11.5px;fill:#1f2328}
.small,.name,.shape,.ms,.label{font-size:10.5px;fill:#59636e}.ms{fill:#7d3c06}
.h1{font-size:16px;font-weight:700}.head-text{font-weight:600}.end{text-anchor:end}.mid{text-anchor:middle}
.page{fill:#fff;stroke:#d8dee4}.card{fill:#fff;stroke:#b8c2cc}.pill{fill:#eaeef2;stroke:#afb8c1}
.ring{fill:#fff;stroke:#57606a;stroke-width:1.4}.bar{fill:#2f6fd0}.rule{stroke:#d8dee4;stroke-opacity:.7}
.frame{fill:#54708f;fill-opacity:.055;stroke:#8fa3b8}.head{fill:#54708f;fill-opacity:.13}.heat{fill:#f0680f}
.loop>.frame{fill:#1b7c83;stroke:#4aa3a9}.loop>g>.head{fill:#1b7c83}
.gate>.frame,.switch>.frame{fill:#8250df;stroke:#a98be0}.gate>g>.head,.switch>g>.head{fill:#8250df}
.map>.frame{fill:#2f7d32;stroke:#7bb07d}.map>g>.head{fill:#2f7d32}
.line{fill:none;stroke:#57606a;stroke-width:1.4}.tip,.dot{fill:#57606a}
.further{stroke:#8250df}.tip-further{fill:#8250df}.again{stroke:#1b7c83;stroke-width:2}.tip-again{fill:#1b7c83}
.state{stroke:#bf3989;stroke-dasharray:5 4}.tip-state{fill:#bf3989}
.label{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.small,.name,.shape,.label{fill:#b4bec9}.ms{fill:#ffc59a}.label{stroke:#0d1117}
.page{fill:#0d1117;stroke:#30363d}.card{fill:#161b22;stroke:#46505c}.pill{fill:#262c36;stroke:#566170}
.ring{fill:#161b22;stroke:#9aa4af}.bar{fill:#5b9bff}.rule{stroke:#30363d}.heat{fill:#e8590c}
.frame{fill:#8fb0d6;fill-opacity:.06;stroke:#52657a}.head{fill-opacity:.35}
.line{stroke:#9aa4af}.tip,.dot{fill:#9aa4af}.further{stroke:#b392f0}.tip-further{fill:#b392f0}
.again{stroke:#4fb8bf}.tip-again{fill:#4fb8bf}.state{stroke:#f778ba}.tip-state{fill:#f778ba}
}
"""
LINES = {  # kinds of edges with a colour of their own -> text in the legend
    "stream": "",
    "further": "extra input",
    "again": "next pass",
    "state": "value of the last call",
}


def to_svg(layout: Layout, sheet: Sheet) -> str:
    """The drawing as SVG; the same layout and texts give the same bytes."""
    header, header_width, header_height = _header(sheet, _kinds(layout))
    width = max(layout.width, header_width) + 2 * MARGIN
    height = header_height + layout.height + 2 * MARGIN
    left = (width - layout.width) / 2
    tips = "".join(
        f'<marker id="tip-{kind}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path class="tip tip-{kind}" d="M0 0.5 8 4 0 7.5Z"/></marker>'
        for kind in LINES
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}" '
            f'viewBox="0 0 {_n(width)} {_n(height)}" role="img">',
            f"<title>{_t(sheet.title)}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{tips}</defs>",
            f'<rect class="page" x="0.5" y="0.5" width="{_n(width - 1)}" height="{_n(height - 1)}" rx="10"/>',
            *header,
            f'<g transform="translate({_n(left)} {_n(MARGIN + header_height)})">',
            *_scene(layout),
            "</g>",
            "</svg>",
            "",
        ]
    )


def _header(sheet: Sheet, kinds: set[str]) -> tuple[list[str], float, float]:
    """Title, numbers and legend; with their width and height."""
    x, y = MARGIN, MARGIN + 54.0
    parts = [_text(x, MARGIN + 14, sheet.title, "h1"), _text(x, MARGIN + 34, sheet.subtitle, "small")]
    samples = [(3.0, '<rect class="bar" y="-10" width="3" height="12"/>', "has params")]
    samples += [(16.0, f'<path class="line {kind}" d="M0 -4H16"/>', LINES[kind]) for kind in LINES if kind in kinds]
    if sheet.hottest is not None:
        shade = '<rect class="heat" x="{}" y="-10" width="9" height="13" fill-opacity="{:.3f}"/>'
        shades = [shade.format(9 * step, HOTTEST * step / 10) for step in range(11)]
        samples.append((99.0, "".join(shades), f"0 to {100 * sheet.hottest:.1f} % {sheet.legend}"))
    for width, sample, words in samples:
        if words:
            parts.append(f'<g transform="translate({_n(x)} {_n(y)})">{sample}</g>')
            parts.append(_text(x + width + 6, y, words, "small"))
            x += width + 6 + text_width(words, SMALL) + 18
    return parts, max(text_width(sheet.title, LARGE) * BOLD, text_width(sheet.subtitle, SMALL), x - 18 - MARGIN), 72.0


def _kinds(layout: Layout) -> set[str]:
    inner = [_kinds(box.inside) for box in layout.boxes if box.inside is not None]
    return {line.edge.kind for line in layout.lines}.union(*inner)


def _scene(layout: Layout) -> Iterator[str]:
    looks = {box.item.name: box.item.content.look for box in layout.boxes if isinstance(box.item.content, Piece)}
    for box in layout.boxes:
        yield from _box(box)
    for line in layout.lines:
        yield _line(line, looks[line.edge.target])
    for line in layout.lines:
        if line.edge.label:
            yield _text(*line.label, line.edge.label, "label")


def _line(line: Line, target_look: str) -> str:
    kind = line.edge.kind if line.edge.kind in LINES else "stream"
    goes_on = target_look in ("port", "bare") or (target_look in ("dot", "turn") and not line.edge.is_back)
    tip = "" if goes_on else f' marker-end="url(#tip-{kind})"'
    title = f"<title>{_t(line.edge.title)}</title>" if line.edge.title else ""
    return f'<path class="line {kind}" d="{_path(line.points)}"{tip}>{title}</path>'


def _box(box: Box) -> Iterator[str]:
    piece = box.item.content
    assert isinstance(piece, Piece)
    at = f'transform="translate({_n(box.x)} {_n(box.y)})"'
    if box.inside is not None:
        yield f'<g class="{piece.look}" {at}{_node(piece.rows[0])}>'
        if piece.look != "bare":
            yield from _frame(box, piece)
        yield f'<g transform="translate({_n(box.inset)} {_n(box.item.head)})">'
        yield from _scene(box.inside)
        yield "</g></g>"
        return
    if piece.look == "card":
        yield f"<g {at}>"
        yield from _card(box, piece.rows)
        yield "</g>"
        return
    row = piece.rows[0]
    yield f"<g {at}{_node(row)}><title>{_t(row.title)}</title>"
    yield from {"ring": _ring, "pill": _pill, "port": _port, "dot": _port, "turn": _port}[piece.look](box, row)
    yield "</g>"


def _frame(box: Box, piece: Piece) -> Iterator[str]:
    row, width, height = piece.rows[0], box.width, box.height
    if piece.look == "map":  # drawn as a stack
        for off in (3.0, 6.0):
            yield f'<path class="line" stroke-opacity=".45" d="M8 {_n(-off)}H{_n(width + off)}V{_n(height - 8)}"/>'
    yield f'<rect class="frame" width="{_n(width)}" height="{_n(height)}" rx="7"/>'
    shape = f'd="M0 {_n(HEAD)}V7Q0 0 7 0H{_n(width - 7)}Q{_n(width)} 0 {_n(width)} 7V{_n(HEAD)}Z"'
    yield f'<g><title>{_t(row.title)}</title><path class="head" {shape}/>'
    if row.share:
        yield f'<path class="heat" fill-opacity="{HOTTEST * row.share:.3f}" {shape}/>'
    yield _text(PADDING, 15, row.lines[0], "head-text")
    if row.ms:
        yield _text(width - PADDING, 15, row.ms, "ms end")
    yield "</g>"


def _card(box: Box, rows: Sequence[RowText]) -> Iterator[str]:
    words_x, shape_x, width = _columns(rows)
    yield f'<rect class="card" width="{_n(box.width)}" height="{_n(box.height)}" rx="5"/>'
    y = 3.0
    for row in rows:
        height = _height(row)
        yield f"<g{_node(row)}><title>{_t(row.title)}</title>"
        opacity = HOTTEST * (row.share or 0.0)
        heat = f'width="{_n(box.width - 2)}" height="{_n(height)}" fill-opacity="{opacity:.3f}"'
        yield f'<rect class="heat" x="1" y="{_n(y)}" {heat}/>'
        if row is not rows[0]:
            yield f'<path class="rule" d="M1 {_n(y)}H{_n(box.width - 1)}"/>'
        if row.has_params:
            yield f'<rect class="bar" x="3" y="{_n(y + 4)}" width="3" height="{_n(height - 8)}"/>'
        is_single = len(row.lines) == 1
        for number, words in enumerate(row.lines):
            yield _text(words_x if is_single else PADDING, y + 13 + ROW * (number + (not is_single)), words)
        for x, words, look in ((PADDING, row.name, "name"), (shape_x, row.shape, "shape end")):
            yield from [_text(x, y + 13, words, look)] if words else []
        yield from [_text(width - PADDING, y + 13, row.ms, "ms end")] if row.ms else []
        yield "</g>"
        y += height


def _ring(box: Box, row: RowText) -> Iterator[str]:
    half = box.width - box.exit
    size = f'x="{_n(box.exit - half)}" width="{_n(2 * half)}" height="{_n(2 * RADIUS)}" rx="{_n(RADIUS)}"'
    yield f'<rect class="ring" {size}/>'
    yield f'<rect class="heat" {size} fill-opacity="{HOTTEST * (row.share or 0.0):.3f}"/>'
    yield _text(box.exit, RADIUS + 4, row.lines[0], "mid")
    beside = [(text, look) for text, look in ((row.shape, "shape"), (row.ms, "ms")) if text]
    for number, (text, look) in enumerate(beside):
        y = RADIUS + 4 - 6.5 * (len(beside) - 1) + 13 * number
        yield _text(box.exit - half - 6, y, text, f"{look} end")


def _pill(box: Box, row: RowText) -> Iterator[str]:
    yield f'<rect class="pill" width="{_n(box.width)}" height="{_n(box.height)}" rx="13"/>'
    yield _text(14, 17, row.lines[0], "head-text")
    if row.shape:
        yield _text(box.width - 14, 17, row.shape, "shape end")


def _port(box: Box, row: RowText) -> Iterator[str]:
    if box.height:
        kind = "further" if row.name else "stream"
        is_turn = isinstance(box.item.content, Piece) and box.item.content.look == "turn"
        yield f'<path class="line {kind}" d="M{_n(box.exit)} 0V{_n(box.height / (2 if is_turn else 1))}"/>'
    if row.name:
        yield _text(box.exit + 5, 12, row.name, "label")
    elif box.height:
        yield f'<circle class="dot" cx="{_n(box.exit)}" cy="{_n(box.height / 2)}" r="3.5"/>'


def _path(points: Sequence[Point]) -> str:
    """Curves between levels, rounded corners elsewhere."""
    way = [points[0]]
    for point in points[1:]:
        if abs(point[0] - way[-1][0]) + abs(point[1] - way[-1][1]) > 0.05:
            way.append(point)
    parts = [f"M{_n(way[0][0])} {_n(way[0][1])}"]
    for number, ((x, y), (to_x, to_y)) in enumerate(pairwise(way)):
        if abs(to_x - x) > 0.5 and abs(to_y - y) > 0.5:
            middle = _n((y + to_y) / 2)
            parts.append(f"C{_n(x)} {middle} {_n(to_x)} {middle} {_n(to_x)} {_n(to_y)}")
            continue
        if number + 2 < len(way) and _is_corner((x, y), (to_x, to_y), way[number + 2]):
            next_x, next_y = way[number + 2]
            before, after = _towards((to_x, to_y), (x, y)), _towards((to_x, to_y), (next_x, next_y))
            parts.append(f"L{_n(before[0])} {_n(before[1])}Q{_n(to_x)} {_n(to_y)} {_n(after[0])} {_n(after[1])}")
        else:
            parts.append(f"L{_n(to_x)} {_n(to_y)}")
    return "".join(parts)


def _is_corner(start: Point, corner: Point, other: Point) -> bool:
    is_level, is_upright = abs(start[1] - corner[1]) <= 0.5, abs(start[0] - corner[0]) <= 0.5
    return (is_level and abs(other[0] - corner[0]) <= 0.5) or (is_upright and abs(other[1] - corner[1]) <= 0.5)


def _towards(start: Point, end: Point) -> Point:
    length = abs(end[0] - start[0]) + abs(end[1] - start[1])
    part = min(CORNER, length / 2) / length
    return (start[0] + part * (end[0] - start[0]), start[1] + part * (end[1] - start[1]))


def _text(x: float, y: float, text: str, look: str = "") -> str:
    style = f' class="{look}"' if look else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{style}>{_t(text)}</text>'


def _node(row: RowText) -> str:
    return f" data-node={quoteattr(_clean(row.path))}" if row.path else ""


def _t(text: str) -> str:
    return escape(_clean(text))


def _clean(text: str) -> str:
    """The text with characters that XML does not allow replaced by "?"."""
    return re.sub("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _n(value: float) -> str:
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
