"""Which CUDA toolkit compiles for which GPUs."""

from pathlib import Path

import pytest

from uneven.errors import InputError
from uneven.install.toolkits import find_toolkits, parse_archs, toolkits_for


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("6.1;12.0", "6.1;12.0"),
        ("12.0, 6.1", "6.1;12.0"),
        ("sm_61 sm_120", "6.1;12.0"),
        ("8.6+PTX;8.6;7.5", "7.5;8.6+PTX"),
    ],
)
def test_archs_as_one_writes_them(text: str, archs: str) -> None:
    assert ";".join(map(str, parse_archs(text))) == archs


@pytest.mark.parametrize("text", ["", "6", "6.1;", "pascal", "3.5", "6.1;99.9", "61"])
def test_archs_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match=r"--archs '"):
        parse_archs(text)


@pytest.mark.parametrize(
    ("archs", "toolkits", "image"),
    [
        ("6.1;12.0", "12.8 to 12.9", "12.8.1"),  # the pair that no prebuilt torch covers
        ("6.1", "12.6 to 12.9", "12.8.1"),
        ("7.0;10.3", "12.9", "12.9.1"),
        ("7.5;8.6", "12.6 or newer", "12.8.1"),
        ("8.9;12.0", "12.8 or newer", "12.8.1"),
        ("7.5;11.0", "13.0 or newer", "13.0.1"),
    ],
)
def test_the_toolkit_for_some_archs(archs: str, toolkits: str, image: str) -> None:
    found = toolkits_for(parse_archs(archs))
    assert str(found) == toolkits
    assert found.image == f"nvidia/cuda:{image}-cudnn-devel-ubuntu22.04"


def test_archs_that_exclude_each_other_are_named() -> None:
    with pytest.raises(InputError, match=r"both 6\.1 \(up to CUDA 12\.9\) and 11\.0 \(from CUDA 13\.0 on\)"):
        toolkits_for(parse_archs("6.1;8.6;11.0"))


def test_the_toolkits_of_a_machine(tmp_path: Path) -> None:
    def add(place: Path, version: str) -> Path:
        (place / "bin").mkdir(parents=True)
        (place / "include").mkdir()
        (place / "include" / "cuda.h").touch()
        (place / "bin" / "nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V1'\n")
        (place / "bin" / "nvcc").chmod(0o755)
        return place

    add(tmp_path / "usr/local/cuda-12.8", "12.8")
    newest = add(tmp_path / "usr/local/cuda-13.0", "13.0")
    (tmp_path / "usr/local/cuda").symlink_to(newest)
    own = add(tmp_path / "own", "12.6")
    (add(tmp_path / "usr/local/cuda-broken", "1.0") / "bin/nvcc").write_text("#!/bin/sh\nexit 1\n")
    wrapper = add(tmp_path / "wrapped", "12.9")  # nvcc alone, as a script that calls another one
    (wrapper / "include" / "cuda.h").unlink()
    environ = {"CUDA_HOME": str(own), "PATH": str(wrapper / "bin")}
    assert [one.version for one in find_toolkits(environ, tmp_path)] == [(12, 6), (13, 0), (12, 8)]
    assert find_toolkits({"PATH": ""}, tmp_path / "own") == []
