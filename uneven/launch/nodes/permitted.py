"""What a leader may run on this machine: the script that was named to `uneven join`, or code of the project here.

Whoever has the token chooses script and arguments. Without a rule that was any file of this machine, such as the module
timeit of the standard library, which takes code as an argument. So it is a file below the folder in which `uneven join`
was typed, equal to the leader's, and no part of an environment that lies there.
"""

import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from uneven.errors import InputError
from uneven.files import is_users_code
from uneven.format import printable
from uneven.launch.find_script import Script
from uneven.machines.code import differing

ENVIRONMENTS = ("pyvenv.cfg", "conda-meta", "lib-dynload")  # what lies in the folders of a Python
NAME_IT = "to run it nevertheless, name it: uneven join ADDRESS:PORT SCRIPT"


def find_permitted(order: Mapping[str, Any], named: Path | None) -> Script:
    """The script of an order, which need not be there yet; InputError where it must not be run here."""
    module, path = order["module"], Path(order["script"]) if named is None else named
    try:
        whole = path.resolve()  # once: a link may lead elsewhere later
        script = Script(whole, tuple(order["args"]), module)
        is_other = whole.exists() and not stat.S_ISREG(whole.stat().st_mode)
        if named is None:
            _check_place(path, whole)
        if module is not None and script.inner_path.with_suffix("") != Path(*module.split(".")):
            raise InputError(f"script {_quoted(path)} is not the module {module} that the leader runs; name its file")
        if named is None and not script.folder.is_relative_to(Path.cwd().resolve()):
            raise InputError(f"script {_quoted(path)}: the module {module} begins outside of this folder; {NAME_IT}")
    except (OSError, RuntimeError, IndexError) as error:  # a name that is too long, links in a circle, too many dots
        raise InputError(f"script {_quoted(path)} cannot be looked at here: {error}") from error
    if is_other:
        raise InputError(f"script {_quoted(path)} is no plain file here, so it is not run")
    return script


def why_not_run(order: Mapping[str, Any], named: Path | None, code: Mapping[str, str]) -> str:
    """Why this machine does not run the code that it has, by its digests; empty where it does."""
    if not code:
        return f"{_quoted(order['script'])} is not here"
    if named is None and (names := differing(order["code"], code)):
        return f"{', '.join(map(printable, names[:5]))} differs from the leader's; {NAME_IT}"
    return ""


def describe_command(script: Script) -> str:
    """What the leader has this machine run, with all arguments, on one line."""
    return printable(shlex.join([*script.words, *script.args]))


def _check_place(path: Path, whole: Path) -> None:
    below = Path.cwd().resolve()
    if ".." in path.parts or not whole.is_relative_to(below):
        raise InputError(
            f"script {_quoted(path)} is not below the folder in which uneven join was typed; type it in the folder of "
            f"the project, or {NAME_IT}"
        )
    inner = whole.relative_to(below)
    is_ours = whole.suffix == ".py" and is_users_code(str(whole)) and not any(p.startswith(".") for p in inner.parts)
    if not is_ours or _has_environment(whole, below):
        raise InputError(
            f"script {_quoted(path)} is no Python file of a project (.py, not in a hidden folder, an environment or an "
            f"installed package); {NAME_IT}"
        )


def _has_environment(whole: Path, below: Path) -> bool:
    """Whether a folder between the two is one of a Python. The project's own may be the top of its environment."""
    between: Sequence[Path] = [folder for folder in whole.parents if folder.is_relative_to(below) and folder != below]
    return any((folder / name).exists() for folder in between for name in ENVIRONMENTS)


def _quoted(path: Path | str) -> str:
    return f"'{printable(str(path))}'"
