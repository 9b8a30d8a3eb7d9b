"""A rank on a machine that joined runs what was compared with the leader's: the content itself, not what is there now.

Between the comparison and the import of a file somebody may write to it, on a folder that both machines share too. So
every file is read once, that content is compared with its digest, and compiled. Called by launch/script.py.
"""

import importlib.util
import runpy
import sys
from collections.abc import Mapping
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import CodeType
from typing import Any

from uneven.errors import RefusedError
from uneven.launch.find_script import Script
from uneven.machines.code import digest, read_code


def execute_compared(script: Script, code: Mapping[str, str]) -> None:
    """Run the script as __main__; `code` has digests by paths below its folder. Its sys.path and sys.argv are set."""
    known = {str(script.folder / name): value for name, value in code.items()}

    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType | None:
            path = str(Path(self.path).resolve())
            if path not in known:
                return super().get_code(fullname)
            return compile(_read(path, known[path]), self.path, "exec", dont_inherit=True)  # not from __pycache__

    def find(place: str) -> Any:
        if not Path(place).resolve().is_relative_to(script.folder):
            raise ImportError("not below the folder of the script")
        kinds = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (Loader, SOURCE_SUFFIXES))
        return FileFinder(place, *kinds, (SourcelessFileLoader, BYTECODE_SUFFIXES))

    sys.path_hooks.insert(0, find)
    for place in [place for place in sys.path_importer_cache if Path(place).resolve().is_relative_to(script.folder)]:
        del sys.path_importer_cache[place]
    if script.module is not None:
        _check_module(script, script.module)
        runpy.run_module(script.module, run_name="__main__", alter_sys=True)
        return
    path = str(script.path)
    main = compile(_read(path, code.get(script.inner_path.as_posix(), "")), path, "exec", dont_inherit=True)
    runpy._run_module_code(main, None, "__main__", script_name=path)  # type: ignore[attr-defined]  # of run_path


def _check_module(script: Script, module: str) -> None:
    """A module of the standard library may have the same name, and be found first."""
    spec = importlib.util.find_spec(module)
    found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
    if found != script.path.resolve():
        raise RefusedError(f"-m {module}: Python finds {found} and not {script.path}, which was compared")


def _read(path: str, known: str) -> bytes:
    try:
        content = read_code(Path(path))
    except OSError as error:
        raise RefusedError(f"{path} cannot be read any more: {error.strerror}") from error
    if digest(content) != known:
        raise RefusedError(f"{path} has changed since it was compared with the leader's; start again")
    return content
