"""The wheel in an empty environment: with numpy alone the embedded data and the hardware report must work."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--wheel", "--sdist", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("uneven-*.whl")
    return found


def test_the_source_archive_has_every_page_at_the_root(built: Path) -> None:
    (archive,) = built.glob("uneven-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    pages = {page.name for page in ROOT.iterdir() if page.suffix in (".md", ".cff")}
    assert {"SECURITY.md", "CITATION.cff", "README.md"} <= pages
    assert pages | {"LICENSE", "Makefile"} <= names


def test_the_wheel_carries_types_licences_and_data_and_stays_small(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "uneven/py.typed" in names
    assert "uneven/data/embedded/mnist-mini.xz" in names
    assert {"uneven/timeline/page.css", "uneven/timeline/page.js"} <= set(names)
    templates = {f"uneven/templates/files/{name}" for name in ("common/gitignore", "common/Makefile", "text/text.txt")}
    assert templates <= set(names)  # what `uneven init` writes
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("LICENSE-mnist-mini.txt") for name in names)
    assert not any(name.startswith("tests") for name in names)
    assert wheel.stat().st_size < 3_000_000


def test_with_numpy_alone_the_data_and_the_hardware_report_work(wheel: Path, tmp_path: Path) -> None:
    """An interpreter that finds its own library, the wheel's files and numpy, and nothing else."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    installed = Path(numpy.__file__).parent.parent
    for part in installed.glob("numpy*"):
        (tmp_path / part.name).symlink_to(part)
    script = f"""
import sys
sys.path.append({str(tmp_path)!r})
from uneven.data import datasets
from uneven.install.advice import read_machine
from uneven.install.diagnosis import diagnose
digits = datasets.load("mnist-mini")
print(digits.train_images.shape, digits.test_labels.shape)
print([problem.what for problem in diagnose(read_machine()).problems])
"""
    isolated = [sys.executable, "-I", "-S", "-c", script]
    done = subprocess.run(isolated, cwd=tmp_path, capture_output=True, text=True, check=True)
    shapes, problems = done.stdout.splitlines()
    assert shapes == "(10000, 1, 28, 28) (2000,)"
    assert "torch" in problems
