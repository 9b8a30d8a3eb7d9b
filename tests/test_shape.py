"""The shape of the code: import arrows, sizes, plain text. What the design promises, checked on every run."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "uneven"
FILES = sorted(PACKAGE.rglob("*.py"))

# The rooms from top to bottom: a room imports only rooms that stand below it, so no two rooms import each other.
ROOMS = (
    *("__main__", "cli", "templates", "bench", "integrations", "api", "core", "plan", "launch", "train", "results"),
    *("step", "parallel", "average", "data"),
    *("timeline", "graph", "machines", "install", "hardware", "comm"),
    *("simulate", "policy", "config", "files", "format", "errors", "version"),
)
ROOT_MODULES = {"__init__", "__main__", "core", "errors", "files", "format", "version"}
PURE = {
    "simulate",
    "policy",
    "config",
    "files",
    "format",
    "errors",
    "version",
}  # no torch, numpy for arrays of ranks in policy


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imported_modules(path: Path) -> list[str]:
    names = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def wrong_imports(path: Path) -> Iterator[str]:
    room = room_of(path)
    may_use_distributed = room == "comm" or path == PACKAGE / "parallel" / "reference.py"
    for name in imported_modules(path):
        parts = name.split(".")
        is_room = parts[0] == "uneven" and len(parts) > 1 and parts[1] in ROOMS
        is_upwards = is_room and parts[1] != room and ROOMS.index(room) >= ROOMS.index(parts[1])
        is_distributed = name.startswith("torch.distributed") and not may_use_distributed
        heavy = ("torch",) if room == "policy" else ("torch", "numpy")
        is_heavy = room in PURE and parts[0] in heavy and not _is_for_types(path)
        if is_upwards or is_distributed or is_heavy:
            yield f"{path.relative_to(PACKAGE)} must not import {name}"


def test_imports_point_downwards() -> None:
    files = [path for path in FILES if room_of(path) != "__init__"]  # it imports the public objects on first use
    assert [wrong for path in files for wrong in wrong_imports(path)] == []


def _is_for_types(path: Path) -> bool:
    return "if TYPE_CHECKING:" in path.read_text()


def test_no_files_import_each_other_in_a_circle() -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    arrows = {
        name: {target for target in imported_modules(path) if target in modules and target != name}
        for name, path in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for target in sorted(arrows[name]):
                visit(target, (*way, name))
            done.add(name)

    for name in sorted(arrows):
        visit(name, ())


# The modules of train/ from top to bottom, on two levels: ranks together, and one rank by itself.
TRAIN_TOGETHER = (
    *("segment", "worker", "settler", "settle", "run_events", "gradient_sync", "local_sgd", "local_state", "policies"),
    *("saves", "saved_state", "synchronizer"),
)
TRAIN_ALONE = ("prepare", "callbacks", "engine", "rank_info", "state", "requests")


def test_train_has_few_modules_each_of_which_imports_only_those_below_it() -> None:
    order = (*TRAIN_TOGETHER, *TRAIN_ALONE)
    paths = [path for path in FILES if room_of(path) == "train" and path.name != "__init__.py"]
    assert {str(path.relative_to(PACKAGE / "train")) for path in paths} == {f"{name}.py" for name in order}
    assert len(order) <= 18
    wrong = [
        f"train/{path.name} must not import {name}"
        for path in paths
        for name in imported_modules(path)
        if name.startswith("uneven.train.") and name.split(".")[2] in order[: order.index(path.stem)]
    ]
    assert wrong == []


def test_only_the_graph_class_imports_the_drawing_of_graphs() -> None:
    users = [path for path in FILES if "uneven.graph.drawing" in imported_modules(path)]
    assert users == [PACKAGE / "graph" / "graph.py"]


def test_every_room_has_its_place() -> None:
    assert {room_of(path) for path in FILES} - {"__init__"} == set(ROOMS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == ROOT_MODULES


def test_files_and_functions_stay_small() -> None:
    for path in FILES:
        source = path.read_text()
        assert source.isascii(), path
        assert source.count("\n") <= 600, path
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno <= 70, f"{path}: {node.name} is too long"


# Rooms whose modules each stand for one thing of a kind, however short: verbs, models, files of a template.
SHORT_IS_RIGHT = {"cli", "bench/models", "templates"}


def test_a_short_module_with_one_importer_beside_it_is_part_of_that() -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    importers: dict[str, set[Path]] = {name: set() for name in modules}
    for path in FILES:
        for name in {name for name in imported_modules(path) if name in modules and modules[name] != path}:
            importers[name].add(path)
    for name, path in modules.items():
        folder = str(path.parent.relative_to(PACKAGE))
        if path.name != "__init__.py" and folder not in SHORT_IS_RIGHT:
            is_alone = [user.parent for user in importers[name]] == [path.parent]
            assert path.read_text().count("\n") >= 120 or not is_alone, f"{name}: only {importers[name]} imports it"


# Their options are those of users, by keyword, as PyTorch's own classes of these names have them.
MANY_OPTIONS = {"FSDP", "Zero1", "Zero2"}


def packed_lines(path: Path) -> Iterator[str]:
    classes = [node for node in nodes_of(path) if isinstance(node, ast.ClassDef) and node.name in MANY_OPTIONS]
    many_options = [method for one in classes for method in one.body]
    for node in nodes_of(path):
        where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Assign):
            for target in node.targets:
                parts = target.elts if isinstance(target, ast.Tuple) else []
                attributes = [part for part in parts if isinstance(part, ast.Attribute)]
                if len(attributes) > 2 or (len(parts) > 2 and isinstance(node.value, ast.Tuple)):
                    yield f"{where} assigns {len(parts)} at once"
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__" and node not in many_options:
            given = len(node.args.args) - 1 + len(node.args.kwonlyargs)
            if given > 6:
                yield f"{where}: a constructor with {given} parameters"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            is_bundle = any(isinstance(argument, ast.Starred) for argument in node.args)
            if is_bundle and node.func.id[:1].isupper():
                yield f"{where} gives {node.func.id} a bundle of arguments by position"


def test_statements_are_not_packed_and_constructors_take_few_arguments_by_name() -> None:
    assert [line for path in FILES for line in packed_lines(path)] == []


def foreign_writes(path: Path) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """Assignments to attributes of something else than `self` and `cls`, with what is assigned."""
    for node in nodes_of(path):
        if isinstance(node, ast.Assign):
            targets = [one for target in node.targets for one in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") not in ("self", "cls"):
                yield target, node.value


# Torch's, Python's and bokeh's own ways.
FUNCTIONS_GIVEN = {"block.forward", "ctx.back", "sys.excepthook", "pickler.persistent_id"}
FOREIGN_WRITES = 266  # in the whole package; 375 before 2026-11-19. It may only become less.


def test_no_function_is_put_into_another_object() -> None:
    """About twenty were, and who read `self._on_done` did not find who had set it."""
    found = []
    for path in FILES:
        nodes = nodes_of(path)
        methods = {one for node in nodes if isinstance(node, ast.ClassDef) for one in node.body}
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node not in methods}
        for target, value in foreign_writes(path):
            is_partial = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "partial"
            is_named = isinstance(value, ast.Name) and value.id in functions
            if (isinstance(value, ast.Lambda) or is_partial or is_named) and ast.unparse(target) not in FUNCTIONS_GIVEN:
                found.append(f"{path.relative_to(PACKAGE)}:{target.lineno} sets {ast.unparse(target)}")
    assert found == []


def test_attributes_are_written_from_outside_less_and_less() -> None:
    assert sum(1 for path in FILES for _ in foreign_writes(path)) <= FOREIGN_WRITES


def test_the_loss_of_a_group_is_caught_in_one_place() -> None:
    """Outside comm/, where it is raised: else each place had its own idea of what goes on afterwards.

    The reader of a stream catches it only to send it to the rank that has asked.
    """
    places = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        if path.relative_to(PACKAGE).parts[0] != "comm"
        for node in nodes_of(path)
        if isinstance(node, ast.ExceptHandler) and node.type is not None and "GroupLostError" in ast.unparse(node.type)
    ]
    assert places == ["data/reader.py", "train/worker.py"]


# What docstrings and comments cite: files, and notes by their names. A note itself goes on with a sentence.
ELSEWHERE = {"sitecustomize.py"}  # of Python itself
CITED_FILE = re.compile(r"(?<![\w/.-])[\w/]+\.py\b")
CITED_NOTE = re.compile(r"\[Note: ([^\]]+)\]")
NOTE = re.compile(r"\[Note: ([^\]]+)\]\s+[A-Z]")


def prose_of(path: Path) -> str:
    """The docstrings and comments of a file."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in nodes_of(path) if isinstance(node, owners)]
    return "\n".join([*docstrings, *re.findall(r"(?:^|  )#[^\n]*", path.read_text(), flags=re.MULTILINE)])


def test_files_and_notes_that_docstrings_and_comments_name_are_there() -> None:
    folders = (PACKAGE, ROOT / "tests", ROOT / "tools", ROOT / "examples")
    known = "".join(f"/{path.relative_to(ROOT)}\n" for folder in folders for path in folder.rglob("*.py"))
    notes = {name for path in FILES for name in NOTE.findall(prose_of(path))}
    missing = []
    for path in [*FILES, *sorted((ROOT / "tests").rglob("*.py"))]:
        prose = prose_of(path)
        missing += [f"{path}: {name}" for name in {*CITED_FILE.findall(prose)} - ELSEWHERE if f"/{name}\n" not in known]
        missing += [f"{path}: [Note: {name}]" for name in CITED_NOTE.findall(prose) if name not in notes]
    assert missing == []


def test_files_of_tests_stay_small_and_those_that_start_first_are_there() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert path.read_text().count("\n") <= 600, path
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_files_of_tests_do_not_import_each_other() -> None:
    """What several of them need stands in a module beside them, or in a conftest."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        found = [name for name in imported_modules(path) if name.split(".")[0] == "tests"]
        assert [name for name in found if any(part.startswith("test_") for part in name.split("."))] == [], path


def programs_in(path: Path) -> Iterator[ast.Module]:
    """What a file of tests gives to other processes as text, as far as it is a whole program."""
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            with suppress(SyntaxError):
                yield ast.parse(dedent(node.value))


def test_programs_in_the_text_of_tests_import_what_is_there() -> None:
    """mypy and a rename of a module do not see them, and those of the storm run only where namespaces are permitted."""
    found = []
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]):
        for node in (node for program in programs_in(path) for node in ast.walk(program)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "uneven":
                found += [(path, f"{node.module}:{alias.name}") for alias in node.names if alias.name != "*"]
            elif isinstance(node, ast.Import):
                found += [(path, alias.name) for alias in node.names if alias.name.split(".")[0] == "uneven"]
    assert len(found) > 50
    assert [(str(path), name) for path, name in found if not is_there(name)] == []


def is_there(name: str) -> bool:
    module, _, attribute = name.partition(":")
    with suppress(ImportError):
        if hasattr(import_module(module), attribute or "__name__"):
            return True
        import_module(f"{module}.{attribute}")
        return True
    return False


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import uneven", ("torch", "numpy", "rich", "typer", "psutil")),
        (
            "import sys; sys.argv = ['uneven', '--help']\n"
            "from uneven.cli.main import main\n"
            "try: main()\nexcept SystemExit: pass",
            ("torch", "numpy", "psutil", "rich", "typer"),
        ),
        ("import uneven.data.datasets", ("torch", "psutil")),
        ("import uneven.install.diagnosis", ("torch", "numpy")),
        ("import uneven.policy.axis", ("torch", "numpy")),
        ("from uneven.templates import machine, project; machine.read_machine()", ("torch", "numpy")),
    ],
)
def test_heavy_packages_are_imported_only_where_needed(code: str, absent: tuple[str, ...]) -> None:
    check = f"{code}\nimport sys\nprint('LOADED', *[m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED"


# The folders of bench/ from top to bottom, and what a benchmark may use of the rooms below: public names, the seam of
# train/ for workers and what starts ranks. Strategies take a process group, so their benchmark forms one.
BENCH = (
    *(
        "demo_page",
        "demo",
        "policies",
        "chaos",
        "scaling",
        "sweep",
        "report",
        "strategies",
        "efficiency",
        "single",
        "models",
        "orders",
        "modes",
    ),
    *("undisturbed", "interval"),
)
BENCH_MAY_USE = (
    *("bench", "config", "data", "errors", "files", "format", "graph", "hardware", "parallel", "results", "timeline"),
    "version",
    *("launch.find_script", "launch.lifeline", "launch.launcher", "launch.checks.preflight", "train.requests"),
    *("launch.run", "launch.script"),
    "train.segment",
    *("api.loop_inputs.check_loop", "api.settings.Settings"),
)
STRATEGIES_MAY_USE = (
    "comm.gather",
    "comm.group",
    "comm.observed",
    "comm.store",
    "comm.torch_group",
    "policy.apportion",
    "policy.redundancy",
)


def test_benchmarks_use_public_names_and_one_seam() -> None:
    for path in sorted((PACKAGE / "bench").rglob("*.py")):
        check_imports_of_a_benchmark(path)


def check_imports_of_a_benchmark(path: Path) -> None:
    parts = path.relative_to(PACKAGE / "bench").parts
    folder = parts[0].removesuffix(".py")
    allowed = BENCH_MAY_USE + (STRATEGIES_MAY_USE if folder == "strategies" else ())
    for name in imported_modules(path):
        if name.startswith("uneven.bench.") and folder != "__init__":
            other = name.split(".")[2]
            assert other == folder or BENCH.index(folder) < BENCH.index(other), f"bench/{folder} imports {name}"
        own = name.removeprefix("uneven.")
        if name.startswith("uneven.") and own.split(".")[0] in ROOMS:
            is_allowed = any(f"{own}.".startswith(f"{prefix}.") for prefix in allowed)
            is_package = any(prefix.startswith(f"{own}.") for prefix in allowed)  # `from uneven.x import y` names both
            assert is_allowed or is_package, f"bench/{folder} imports {name}"


def test_plain_verbs_and_fit_import_neither_the_benchmarks_nor_torchs_compiler() -> None:
    """All in one process: what none of them loads together, none loads alone. The compiler is two of four seconds."""
    verbs = ("devices", "run", "data", "diagnose", "state")
    check = (
        "import sys\n"
        "from uneven.cli.main import main\n"
        f"for verb in {verbs!r}:\n"
        "    sys.argv = ['uneven', verb, '--help']\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        f"import {', '.join(f'uneven.cli.{verb}' for verb in verbs)}, uneven.launch.run, uneven.api.fit\n"
        "from uneven import fit\n"
        "from uneven.data.script_settings import TorchModes\n"
        "TorchModes.read().set()\n"  # in every rank and loader process
        "heavy = ('uneven.bench', 'torch._dynamo', 'torch._inductor')\n"
        "print('LOADED', *[name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert all(f"uneven {verb}" in done.stdout for verb in verbs)
    assert done.stdout.splitlines()[-1] == "LOADED"
