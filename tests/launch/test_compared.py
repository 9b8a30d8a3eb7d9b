"""A rank on a machine that joined runs what was compared, whatever lies there by now."""

import sys
from pathlib import Path

import pytest

from uneven.errors import RefusedError
from uneven.launch.find_script import Script
from uneven.launch.script import execute
from uneven.machines.code import script_digests


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that notes what it and its helper are; what the import system knows is put back."""
    (tmp_path / "shop").mkdir()
    for name in ("compared_main", "shop/train", "json"):
        (tmp_path / f"{name}.py").write_text(
            "import sys\nfrom compared_helper import value\nfrom pathlib import Path\n"
            "Path(__file__).with_suffix('.ran').write_text(f'{__name__} {value} {sys.argv[1:]}')\n"
        )
    (tmp_path / "shop" / "__init__.py").write_text("")
    (tmp_path / "compared_helper.py").write_text("value = 1\n")
    (tmp_path / "shop" / "compared_helper.py").write_text("value = 2\n")
    for name in ("path_hooks", "path", "argv"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    for module in ("compared_helper", "shop", "shop.train"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script_in(folder: Path) -> Script:
    return Script(folder / "compared_main.py", ("--lr", "1"))


def run(script: Script, code: dict[str, str] | None = None) -> None:
    try:
        execute(script, script_digests(script.path, script.folder, script.package) if code is None else code)
    finally:
        for module in ("compared_helper", "shop", "shop.train"):
            sys.modules.pop(module, None)


def test_it_runs_as_python_does(folder: Path) -> None:
    run(script_in(folder))
    assert (folder / "compared_main.ran").read_text() == "__main__ 1 ['--lr', '1']"
    run(Script(folder / "shop" / "train.py", (), "shop.train"))
    assert (folder / "shop" / "train.ran").read_text() == "__main__ 1 []"


@pytest.mark.parametrize("name", ["compared_main.py", "compared_helper.py"])
def test_what_has_changed_is_not_run(folder: Path, name: str) -> None:
    """Not even where Python has a compiled file of what was there."""
    code = script_digests(folder / "compared_main.py", folder)
    (folder / name).write_text((folder / name).read_text() + "value = 3\n")
    with pytest.raises(RefusedError, match=f"{name} has changed"):
        run(script_in(folder), code)
    assert not list(folder.glob("*.ran"))


def test_a_module_of_the_library_is_not_taken_for_the_one_that_was_compared(folder: Path) -> None:
    with pytest.raises(RefusedError, match="-m json: Python finds"):
        run(Script(folder / "json.py", (), "json"))
