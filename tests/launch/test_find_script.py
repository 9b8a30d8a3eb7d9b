"""`uneven run -m package.train`: which file that is, and that it runs as `python -m package.train` runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from uneven.errors import InputError
from uneven.launch.find_script import Script, find_module, find_script, refuse_no_file, uses_uneven
from uneven.launch.script import run_script

# Written to a file, since two processes that write to one terminal may mix their lines.
TELLS = """
import json, sys
from pathlib import Path
from . import words
import beside
facts = [__name__, __package__, __spec__.name, sys.argv, sys.path[0], words.ONE, beside.TWO]
Path("facts-0.json").write_text(json.dumps(facts))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package, a namespace package below it, and a module beside it; this folder is the current one."""
    (tmp_path / "shop" / "jobs").mkdir(parents=True)
    for name, text in {
        "shop/__init__.py": "raise SystemExit('the launcher has imported it')\n",
        "shop/__main__.py": "from . import train\n",
        "shop/train.py": TELLS,
        "shop/words.py": "ONE = 1\n",
        "shop/jobs/night.py": "",
        "beside.py": "TWO = 2\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr(sys, "argv", ["uneven"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file", "module", "words"),
    [
        ("shop.train", "shop/train.py", "shop.train", "-m shop.train"),
        ("shop", "shop/__main__.py", "shop.__main__", "-m shop"),
        ("shop.jobs.night", "shop/jobs/night.py", "shop.jobs.night", "-m shop.jobs.night"),
        ("beside", "beside.py", "beside", "-m beside"),
    ],
)
def test_a_module_is_found_and_nothing_is_imported_for_it(
    project: Path, name: str, file: str, module: str, words: str
) -> None:
    found = find_module(name, ["--own"])
    assert (found.path, found.module, found.args, str(found)) == (project / file, module, ("--own",), words)
    assert (found.folder, found.inner_path) == (project, Path(file))
    assert Script.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert "shop" not in sys.modules


def test_a_script_is_what_its_path_says(project: Path) -> None:
    found = find_script(Path("shop/train.py"), [], is_module=False)
    assert (found.folder, found.inner_path, str(found)) == (project / "shop", Path("train.py"), "shop/train.py")


def test_an_installed_module_is_found() -> None:
    found = find_module("pytest")
    assert (found.module, found.path.name) == ("pytest.__main__", "__main__.py")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("shop/train.py", "-m shop/train.py: a module is named without its folder and '.py', as in -m shop.train"),
        ("train.py", "as in -m train$"),
        ("shop.trian", "-m shop.trian: there is no such module in this folder"),
        ("nowhere.train", "-m nowhere.train: there is no package nowhere in this folder"),
        ("beside.train", "there is no package beside"),
        ("shop.jobs", "-m shop.jobs: a package without __main__.py; name a module in it, as in -m shop.jobs.train"),
        ("sys", "-m sys has no source to run"),
        ("__main__", "no such module"),
        ("", "no such module"),
    ],
)
@pytest.mark.usefixtures("project")
def test_a_name_that_is_no_module_is_refused(name: str, told: str) -> None:
    with pytest.raises(InputError, match=told.replace("?", "[?]")):
        find_module(name)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("shop/trian.py", "'shop/trian.py': there is no such file; give its path"),
        ("shop", "is a folder; name the script in it"),
    ],
)
@pytest.mark.usefixtures("project")
def test_a_script_that_is_not_there_is_refused(name: str, told: str) -> None:
    with pytest.raises(InputError, match=told.replace("?", "[?]")):
        refuse_no_file(Path(name))


def test_a_module_uses_uneven_where_another_of_its_package_does(project: Path) -> None:
    (project / "shop" / "__init__.py").write_text("")
    assert not uses_uneven(find_module("shop"))
    (project / "shop" / "words.py").write_text("import uneven\nONE = 1\n")
    assert uses_uneven(find_module("shop"))
    assert not uses_uneven(find_module("beside"))


def test_it_runs_as_python_runs_it(project: Path) -> None:
    (project / "shop" / "__init__.py").write_text("")
    subprocess.run([sys.executable, "-m", "shop.train", "--own", "3"], cwd=project, check=True)
    wanted = project / "facts-0.json"
    pythons = json.loads(wanted.read_text())
    wanted.unlink()
    run_script(find_module("shop.train", ["--own", "3"]), {"devices": "cpu"})
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shop", "beside")]:
        del sys.modules[name]
    assert json.loads((project / "facts-0.json").read_text()) == pythons
    assert pythons[:3] == ["__main__", "shop", "shop.train"]


def test_every_rank_runs_it(project: Path) -> None:
    (project / "shop" / "__init__.py").write_text("")
    (project / "shop" / "train.py").write_text(
        "import uneven" + TELLS.replace('"facts-0.json"', 'f"facts-{uneven.Ddp.rank()}.json"')
    )
    run_script(find_module("shop.train"), {"devices": "cpu,cpu"})
    told = [json.loads(path.read_text()) for path in sorted(project.glob("facts-*.json"))]
    assert len(told) == 2
    assert all(facts[:3] == ["__main__", "shop", "shop.train"] for facts in told)
