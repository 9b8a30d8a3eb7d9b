"""A scene as DOT: a node for every row, a cluster for every frame. Graphviz does the layout."""

from collections.abc import Iterator

from uneven.graph.drawing.scene import Item, Scene
from uneven.graph.drawing.svg import Piece, Sheet

SHAPES = {"ring": "shape=circle", "pill": "shape=ellipse", **dict.fromkeys(("port", "dot", "turn"), "shape=point")}
STYLES = {"state": "style=dashed constraint=false", "again": "constraint=false", "further": "color=purple"}


def to_dot(scene: Scene, sheet: Sheet) -> str:
    return "\n".join(_document(scene, sheet))


def _document(scene: Scene, sheet: Sheet) -> Iterator[str]:
    yield "digraph {"
    yield f'  label={_quoted(sheet.title)} labelloc=t fontname="Helvetica" compound=true'
    yield '  node [style="rounded,filled" fillcolor=white fontname="Helvetica" fontsize=11]'
    yield '  edge [fontname="Helvetica" fontsize=10]'
    yield from _scene(scene, "", "  ")
    yield "}\n"


def _scene(scene: Scene, prefix: str, indent: str) -> Iterator[str]:
    items = {item.name: item for item in scene.items}
    for item in scene.items:
        assert isinstance(item.content, Piece)
        at, rows, look = f"{prefix}{item.name}", item.content.rows, item.content.look
        if item.scene is not None:
            label = rows[0].lines[0] if look != "bare" else ""
            yield f"{indent}subgraph {_quoted(f'cluster {at}')} {{"
            yield f"{indent}  label={_quoted(label)} tooltip={_quoted(rows[0].title)}"
            yield from _scene(item.scene, f"{at}/", f"{indent}  ")
            yield f"{indent}}}"
            continue
        for number, row in enumerate(rows):
            label = "\n".join(filter(None, (row.name, *row.lines, row.shape, f"{row.ms} ms" if row.ms else "")))
            style = f"label={_quoted(label)} tooltip={_quoted(row.title)} {SHAPES.get(look, 'shape=box')}"
            yield f"{indent}{_quoted(f'{at}#{number}')} [{style}]"
            if number:
                yield f"{indent}{_quoted(f'{at}#{number - 1}')} -> {_quoted(f'{at}#{number}')}"
    for edge in scene.edges:
        ends = f"{_end_of(items[edge.source], prefix)} -> {_end_of(items[edge.target], prefix, edge.place)}"
        style = f"label={_quoted(edge.label)} tooltip={_quoted(edge.title)} {STYLES.get(edge.kind, '')}"
        yield f"{indent}{ends} [{style.rstrip()}]"


def _end_of(item: Item, prefix: str, place: int | None = None) -> str:
    """The node where an item's edges begin, or where they end if a place is given. Those of a frame are its ports."""
    assert isinstance(item.content, Piece)
    if item.scene is None:
        row = 0 if place is not None else len(item.content.rows) - 1
        return _quoted(f"{prefix}{item.name}#{row}")
    name = item.scene.exits[0] if place is None else item.scene.entries[min(place, len(item.scene.entries) - 1)]
    return _quoted(f"{prefix}{item.name}/{name}#0")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
