"""Builds of torch that are there by their records alone, and wheels that hold nothing but what a test needs."""

import json
import zipfile
from pathlib import Path
from typing import Any

from uneven.install.builds import RECORD, builds_folder

CU126 = {
    "version": "2.13.0+cu126",
    "cuda": "12.6",
    "hip": None,
    "archs": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
    "size_bytes": 6_500_000_000,
    "source": "torch>=2.8,<2.15 of cu126",
}
CPU = {**CU126, "version": "2.13.0+cpu", "cuda": None, "archs": [], "size_bytes": 900_000_000, "source": "cpu"}


def add_build(name: str, facts: dict[str, Any] = CU126, python: str = 'echo "$0" "$@"') -> Path:
    """A complete build in $UNEVEN_HOME whose Python is a shell script."""
    folder = builds_folder() / name
    (folder / "bin").mkdir(parents=True)
    for script in ("python", "uneven"):
        (folder / "bin" / script).write_text(f"#!/bin/sh\n{python}\n")
        (folder / "bin" / script).chmod(0o755)
    (folder / RECORD).write_text(json.dumps(facts))
    return folder


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """A wheel that pip installs: the files, and as little metadata as the format allows."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    metadata = {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    listed = "".join(f"{file},,\n" for file in [*files, *metadata, f"{stem}.dist-info/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**files, **metadata, f"{stem}.dist-info/RECORD": listed}.items():
            wheel.writestr(file, text)
    return path


FAKE_TORCH = {
    "torch/__init__.py": (
        "from torch import cuda, version\n__version__ = version.__version__\ndef get_num_threads():\n    return 1\n"
    ),
    "torch/version.py": "__version__ = '2.13.0+cu126'\ncuda = '12.6'\nhip = None\n",
    "torch/cuda.py": "def get_arch_list():\n    return ['sm_50', 'sm_60']\n",
}
