"""The shape of the code: import arrows, sizes, plain text. What the design promises, checked on every run."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "uneven"
FILES = sorted(PACKAGE.rglob("*.py"))

# Who may import whom, by the first name below `uneven`. Lower layers never import upper ones.
ARROWS = {
    "errors": set(),
    "files": {"errors"},
    "config": {"errors"},
    "policy": set(),
    "timeline": {"errors", "files"},
    "hardware": {"errors"},
    "comm": {"errors"},
    "payload": set(),
    "data": {"errors", "files", "policy"},
    "share": set(),
    "parallel": {"comm", "config", "errors", "share"},
    "optim": {"comm", "parallel"},
    "average": {"comm", "errors"},
    "step": {"comm", "config", "data", "errors", "parallel", "policy"},
    "state": {"data", "errors", "files", "policy", "timeline"},
    "progress": {"policy"},
    "seat": {"comm", "hardware", "policy", "state", "timeline"},
    "rig": {"config", "data", "hardware", "parallel", "policy", "seat", "state", "step", "timeline"},
    "pace": {"average", "comm", "config", "data", "errors", "parallel", "policy", "rig", "step"},
    "worker": {"comm", "config", "data", "pace", "policy", "rig", "seat", "state", "step", "timeline"},
    "member": {
        *("comm", "config", "data", "errors", "hardware", "policy", "seat", "state", "timeline", "worker"),
    },
    "script": {"comm", "config", "hardware", "member"},
    "rank": {"comm", "errors", "hardware", "payload", "script", "worker"},
    "supervise": {
        *("comm", "config", "data", "errors", "hardware", "payload", "policy", "progress", "state", "timeline"),
    },
    "start": {"config", "errors", "hardware", "progress", "script", "supervise"},
    "prepare": {"comm", "config", "data", "errors", "files", "hardware", "member", "policy", "progress"},
    "run": {
        *("comm", "config", "errors", "hardware", "member", "policy", "prepare", "progress"),
        *("seat", "state", "supervise", "timeline", "worker"),
    },
    "loop": {"comm", "config", "data", "errors", "pace", "policy", "seat", "state", "worker"},
    "manual": {"average", "comm", "errors"},
    "ddp": {
        *("comm", "config", "errors", "hardware", "loop", "manual", "member", "policy", "prepare", "run", "seat"),
        "state",
    },
    "graph": {"errors"},
    "bench": {
        *("comm", "config", "data", "ddp", "errors", "files", "graph", "hardware", "loop", "optim", "pace"),
        *("parallel", "policy", "prepare", "progress", "rank", "rig", "run", "seat", "share", "start", "state"),
        *("step", "supervise", "timeline", "worker"),
    },
    "cli": {"bench", "data", "errors", "hardware", "start"},
    "__main__": {"cli"},
}


def imported_modules(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path: Path) -> None:
    home = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if home == "__init__":
        return
    for name in imported_modules(path):
        parts = name.split(".")
        if parts[0] == "uneven" and len(parts) > 1 and parts[1] in ARROWS:
            assert parts[1] == home or parts[1] in ARROWS[home], f"{home} must not import {name}"
        may_wire = home == "comm" or path == PACKAGE / "parallel" / "reference.py"
        assert may_wire or not name.startswith("torch.distributed"), f"{home} must not import {name}"


def test_every_part_of_the_package_has_its_arrows() -> None:
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert parts == set(ARROWS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    source = path.read_text()
    assert source.isascii()
    assert source.count("\n") <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno <= 70, f"{node.name} is too long"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import uneven", ("torch", "numpy", "rich", "typer", "psutil")),
        (
            "import sys; sys.argv = ['uneven', '--help']\n"
            "from uneven.cli.main import main\n"
            "try: main()\nexcept SystemExit: pass",
            ("torch", "numpy", "psutil"),
        ),
        ("from uneven import fit", ("torch._dynamo",)),  # torch's compiler: two of four seconds
        ("import uneven.data.datasets", ("torch", "psutil")),
        ("import uneven.hardware.diagnosis", ("torch", "numpy")),
        ("import uneven.policy.axis", ("torch", "numpy")),
    ],
)
def test_heavy_packages_are_imported_only_where_needed(code: str, absent: tuple[str, ...]) -> None:
    check = f"{code}\nimport sys\nprint('LOADED', *[m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED"
