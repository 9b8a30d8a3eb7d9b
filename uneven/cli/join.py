"""`uneven join`: this machine takes part in a run that `uneven run --nodes` leads on another one."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def join(
    leader: Annotated[str, typer.Argument(metavar="ADDRESS:PORT", help="Where the leader waits, as it printed it.")],
    script: Annotated[
        Path | None, typer.Argument(help="The script, where it is not at the leader's path below this folder.")
    ] = None,
    token: Annotated[str | None, typer.Option("--token", help="The leader's token.", metavar="TOKEN")] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="The file with the token; - is stdin.", metavar="FILE")
    ] = None,
    devices: Annotated[
        str, typer.Option("--devices", help="The devices of this machine, one rank each, as in cuda:0,cpu.")
    ] = "auto",
    allow_ship: Annotated[
        bool,
        typer.Option("--allow-ship", help="Take the script's folder from the leader where it differs (--ship there)."),
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", help="How long to try while no leader answers.", metavar="SECONDS")
    ] = 8.0,
    only_when_idle: Annotated[
        bool, typer.Option("--only-when-idle", help="Wait until nobody has used this machine for 5 minutes.")
    ] = False,
    between: Annotated[
        str | None,
        typer.Option("--between", help="Wait for this time of the day, as in 22:00-07:00.", metavar="HH:MM-HH:MM"),
    ] = None,
    on_battery: Annotated[
        bool, typer.Option("--on-battery/--not-on-battery", help="Whether to take part while it runs on battery.")
    ] = True,
) -> None:
    """Take part in a run that another machine leads, with this machine's devices.

    Script, arguments and settings come from the leader; the script must be here too, at the same path below the
    current folder and with the same content. The token may also be in UNEVEN_TOKEN. Exit codes as of uneven run.
    A machine that somebody needs waits before it joins, and says why: in use are one at whose terminals somebody
    types, and one whose other programs use a fifth of its cores.

    Examples:

      uneven join 192.0.2.10:29400 --token TOKEN

      uneven join 192.0.2.10:29400 --token-file token --devices cuda:0,cuda:1 --allow-ship

      uneven join 192.0.2.10:29400 --token-file token --only-when-idle --between 22:00-07:00 --not-on-battery
    """
    from uneven.hardware.presence import Rules, parse_between, wait_until_free
    from uneven.launch.node import JoinOptions, join_run
    from uneven.machines.options import need_token, read_token

    def say(line: str) -> None:
        print(f"uneven: {line}", file=sys.stderr, flush=True)

    known = need_token(read_token(token, token_file))
    wait_until_free(Rules(only_when_idle, () if between is None else parse_between(between), on_battery), say)
    join_run(JoinOptions(leader, known, devices, script, allow_ship, wait), say)
