"""The shape of the package in numbers: rooms, import arrows between them, circles, sizes of files.

    python tools/shape.py [FOLDER]     # FOLDER holds the package `uneven`; default: this checkout

A room is a folder below uneven/ (or a module at its root). An arrow is a pair of rooms of which the first imports the
second. Arrows inside a circle of rooms are those that no order from top to bottom can make point downwards.
"""

import ast
import statistics
import sys
from pathlib import Path


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name in modules}


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of more than one node: those that reach each other."""
    reach = {name: _reach(name, arrows) for name in arrows}
    found: list[set[str]] = []
    for name in arrows:
        circle = {name} | {other for other in reach[name] if name in reach[other]}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def _reach(start: str, arrows: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for target in arrows[waiting.pop()] - seen:
            seen.add(target)
            waiting.append(target)
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
    stuck = sum(1 for circle in circles(rooms) for room in circle for target in rooms[room] if target in circle)
    lengths = [path.read_text().count("\n") for path in files if path.read_text().strip()]
    root = [path for path in files if path.parent == package]
    print(f"modules at the root       {len(root)}")
    print(f"rooms                     {len(rooms)}")
    print(f"arrows between rooms      {sum(len(targets) for targets in rooms.values())}")
    print(f"  of them in a circle     {stuck}")
    print(f"circles of files          {len(circles(arrows))} ({sum(len(circle) for circle in circles(arrows))} files)")
    print(f"files                     {len(lengths)}")
    print(f"  under 60 lines          {sum(1 for length in lengths if length < 60)}")
    print(f"  median length           {statistics.median(lengths):.0f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)
