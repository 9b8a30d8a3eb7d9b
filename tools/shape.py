"""Print the structure of the package in numbers: folders, imports between them, import cycles, sizes of files.

    python tools/shape.py [FOLDER]     # FOLDER holds the package `uneven`; default: this checkout

A room is a folder below uneven/ or a module at its root. An arrow is a pair of rooms of which the first imports the
second. A circle is a set of rooms (or files) that import each other: no order can make all its arrows point downwards.
"""

import ast
import statistics
import sys
from pathlib import Path


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name in modules}


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one node."""
    reach = {name: _reach(name, arrows) for name in arrows}
    components: list[set[str]] = []
    for name in arrows:
        circle = {name} | {other for other in reach[name] if name in reach[other]}
        if len(circle) > 1 and circle not in components:
            components.append(circle)
    return components


def _reach(start: str, arrows: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    to_visit = [start]
    while to_visit:
        for target in arrows[to_visit.pop()] - seen:
            seen.add(target)
            to_visit.append(target)
    return seen


def main(folder: Path) -> None:
    package = folder / "uneven"
    files = [path for path in sorted(package.rglob("*.py")) if path.name != "__init__.py" or path.parent != package]
    modules = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path for path in files
    }
    arrows = {name: imports_of(path, modules) - {name} for name, path in modules.items()}
    rooms: dict[str, set[str]] = {}
    for name, targets in arrows.items():
        room = name.split(".")[1]
        rooms.setdefault(room, set()).update(target.split(".")[1] for target in targets)
    for room, targets in rooms.items():
        targets.discard(room)
    in_circle = sum(1 for circle in circles(rooms) for room in circle for target in rooms[room] if target in circle)
    lengths = [path.read_text().count("\n") for path in files if path.read_text().strip()]
    root = [path for path in files if path.parent == package]
    print(f"modules at the root       {len(root)}")
    print(f"rooms                     {len(rooms)}")
    print(f"arrows between rooms      {sum(len(targets) for targets in rooms.values())}")
    print(f"  of them in a circle     {in_circle}")
    print(f"circles of files          {len(circles(arrows))} ({sum(len(circle) for circle in circles(arrows))} files)")
    print(f"files                     {len(lengths)}")
    print(f"  under 60 lines          {sum(1 for length in lengths if length < 60)}")
    print(f"  median length           {statistics.median(lengths):.0f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)
