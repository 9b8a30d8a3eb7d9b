"""`uneven join`: this machine takes part in a run that `uneven run --nodes` leads on another one."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from uneven.cli import complete
from uneven.cli.output import print_json, say


@dataclass(frozen=True)
class Joined:
    """What --json prints."""

    leader: str
    devices: str
    seconds: float


def join(
    leader: Annotated[str, typer.Argument(metavar="ADDRESS:PORT", help="The leader's address, as it printed it.")],
    script: Annotated[
        Path | None,
        typer.Argument(help="The one script that the leader may run here; default: any Python file of this folder."),
    ] = None,
    token: Annotated[str | None, typer.Option("--token", help="The leader's token.", metavar="TOKEN")] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="The file with the token; - is stdin.", metavar="FILE")
    ] = None,
    devices: Annotated[
        str,
        typer.Option(
            "--devices",
            help="The devices of this machine, one rank each, as in cuda:0,cpu.",
            autocompletion=complete.devices,
        ),
    ] = "auto",
    wait: Annotated[
        float, typer.Option("--wait", help="Seconds to try if no leader answers.", metavar="SECONDS")
    ] = 8.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object at the end; what the script prints goes to stderr.")
    ] = False,
) -> None:
    """Take part in a run that another machine leads, with this machine's devices.

    Script, arguments and settings come from the leader. The script must be here, too, at the same path below the
    current folder and with the same content.

    What the token permits: whoever has it, and the address, can have this machine run, as your user, any Python file
    of yours below the current folder whose content they know, or SCRIPT alone if you name it, with arguments and
    settings of their choice. Nothing is copied to this machine. The arguments are shown before the run.

    The token may also be in UNEVEN_TOKEN. Exit codes are those of uneven run.

    SIGTERM or Ctrl-C here, or uneven leave in another terminal, lets the ranks of this machine hand in what they have
    trained and leave; the others continue, and the exit code is 0. A second signal ends them at once. If the run cannot
    continue without them, it stops and is saved.

    Examples:

      uneven join 192.0.2.10:29400 --token TOKEN

      uneven join 192.0.2.10:29400 --token-file token --devices cuda:0,cuda:1
    """
    from uneven.launch.nodes.node import JoinOptions, join_run
    from uneven.launch.results_file import stdout_to_stderr
    from uneven.machines.options import need_token, read_token

    known = need_token(read_token(token, token_file))
    options = JoinOptions(leader, known, devices, script, wait)
    begin_s = time.monotonic()
    with stdout_to_stderr() if as_json else nullcontext():
        join_run(options, say)
    if as_json:
        print_json(Joined(leader, devices, round(time.monotonic() - begin_s, 2)))
