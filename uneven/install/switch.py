"""Verbs that use torch run with the active build: the command line starts itself again in its environment.

Only where the user asked for it, by `uneven torch activate NAME` or by UNEVEN_TORCH=NAME for one call, and one line
says so. UNEVEN_TORCH=none is this environment whatever is active. Called first in main(), before anything is loaded.
"""

import os
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from uneven.errors import InputError, MachineError

if TYPE_CHECKING:
    from uneven.install.builds import Build

VARIABLE = "UNEVEN_TORCH"
# What loads torch. The others answer at once in the environment they were called in, `uneven torch` and `uneven setup`
# among them: they must work where the active build does not, and setup is about this environment.
VERBS = ("run", "join", "chaos", "demo", "bench", "devices", "diagnose", "preflight", "state", "plan", "config")


def chosen_build(environ: Mapping[str, str]) -> "tuple[Build, str] | None":
    """The build that was asked for, and by what; None for this environment. An error where it is not there."""
    from uneven.install.builds import NO_BUILD, active_name, find_build  # here: `uneven --help` must be instant

    name = environ.get(VARIABLE)
    if name == NO_BUILD:
        return None
    if name:
        return find_build(name), VARIABLE
    active = active_name()
    if active is None:
        return None
    try:
        return find_build(active), "uneven torch activate"
    except InputError:
        raise MachineError(
            f"torch build {active!r} is active, but it is not there any more; "
            "go on without it: uneven torch activate --none"
        ) from None


def command_in_build(
    arguments: Sequence[str], environ: Mapping[str, str], loaded: Container[str] = sys.modules
) -> tuple[list[str], str] | None:
    """The command that does the same in the chosen build, and the line to say; None to go on here."""
    verb = next((word for word in arguments if not word.startswith("-")), None)
    own = arguments[: list(arguments).index("--")] if "--" in arguments else arguments  # what follows is the script's
    if verb not in VERBS or any(word in ("-h", "--help") for word in own):
        return None
    if "torch" in loaded:  # a notebook, a test: this process has decided already
        return None
    chosen = chosen_build(environ)
    if chosen is None:
        return None
    build, why = chosen
    folder = Path(build.python).parent
    if Path(sys.prefix).resolve() == folder.parent.resolve():
        return None
    script = folder / "uneven"
    if not script.is_file() or not os.access(build.python, os.X_OK):
        raise MachineError(
            f"the environment of torch build {build.name} is broken ({folder.parent}): "
            f"uneven torch remove --force {build.name}"
        )
    # Its console script and not `-m uneven`, which would put the folder we are in before the packages.
    return [build.python, str(script), *arguments], f"uneven: runs with torch build {build.name} ({why})"


def switch_to_build() -> None:
    """Go on in the chosen build's environment, in this very process; returns where there is nothing to change."""
    command = command_in_build(sys.argv[1:], os.environ)
    if command is not None:
        line, said = command
        print(said, file=sys.stderr, flush=True)
        os.execv(line[0], line)
