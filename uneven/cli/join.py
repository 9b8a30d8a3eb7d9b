"""`uneven join`: this machine takes part in a run that `uneven run --nodes` leads on another one."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.cli import complete

if TYPE_CHECKING:
    from uneven.hardware.presence import Presence
    from uneven.launch.nodes.node import JoinOptions

Devices = Annotated[
    str,
    typer.Option(
        "--devices",
        help="The devices of this machine, one rank each, as in cuda:0,cpu.",
        autocompletion=complete.devices,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object at the end; what the script prints goes to stderr.")
]


def join(
    leader: Annotated[str, typer.Argument(metavar="ADDRESS:PORT", help="The leader's address, as it printed it.")],
    script: Annotated[
        Path | None, typer.Argument(help="The script, if it is not at the leader's path below this folder.")
    ] = None,
    token: Annotated[str | None, typer.Option("--token", help="The leader's token.", metavar="TOKEN")] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="The file with the token; - is stdin.", metavar="FILE")
    ] = None,
    devices: Devices = "auto",
    allow_ship: Annotated[
        bool,
        typer.Option("--allow-ship", help="Take the script's folder from the leader if it differs (--ship there)."),
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", help="Seconds to try if no leader answers.", metavar="SECONDS")
    ] = 8.0,
    only_when_idle: Annotated[
        bool, typer.Option("--only-when-idle", help="Take part only while nobody has used this machine for 5 minutes.")
    ] = False,
    between: Annotated[
        str | None,
        typer.Option("--between", help="Take part at this time of the day, as in 22:00-07:00.", metavar="HH:MM-HH:MM"),
    ] = None,
    on_battery: Annotated[
        bool, typer.Option("--on-battery/--not-on-battery", help="Whether to take part while it runs on battery.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Take part in a run that another machine leads, with this machine's devices.

    Script, arguments and settings come from the leader. The script must be here, too, at the same path below the
    current folder and with the same content. The token may also be in UNEVEN_TOKEN. Exit codes are those of uneven run.

    With --only-when-idle, --between and --not-on-battery the machine waits until it is free, leaves when it is needed,
    and joins again when it is free. In use means: somebody types in one of its terminals, or other programs use a fifth
    of its cores.

    SIGTERM or Ctrl-C here, or uneven leave in another terminal, lets the ranks of this machine hand in what they have
    trained and leave; the others continue, and the exit code is 0. A second signal ends them at once. If the run cannot
    continue without them, it stops and is saved.

    Examples:

      uneven join 192.0.2.10:29400 --token TOKEN

      uneven join 192.0.2.10:29400 --token-file token --devices cuda:0,cuda:1 --allow-ship

      uneven join 192.0.2.10:29400 --token-file token --only-when-idle --between 22:00-07:00 --not-on-battery
    """
    from uneven.hardware.presence import Presence, Rules, parse_between
    from uneven.launch.nodes.node import JoinOptions
    from uneven.launch.results_file import stdout_to_stderr
    from uneven.machines.options import need_token, read_token

    def say(line: str) -> None:
        print(f"uneven: {line}", file=sys.stderr, flush=True)

    known = need_token(read_token(token, token_file))
    rules = Rules(only_when_idle, () if between is None else parse_between(between), on_battery)
    presence = None if rules == Rules() else Presence(rules)
    options = JoinOptions(leader, known, devices, script, allow_ship, wait, presence)
    with stdout_to_stderr() if as_json else nullcontext():
        found = _take_part(options, presence, say)
    if as_json:
        print(json.dumps({"leader": leader, "devices": devices, **found}, indent=1))


def _take_part(options: "JoinOptions", presence: "Presence | None", say: Callable[[str], None]) -> dict[str, float]:
    """Join, and after a machine that was needed is free again once more; how often, and how long it took."""
    from uneven.hardware.presence import wait_until_free
    from uneven.launch.nodes.node import join_run

    begin_s, joined, may_return = time.monotonic(), 0, True
    while may_return:
        wait_until_free(presence, say)
        may_return = join_run(options, say, is_return=joined > 0)
        joined += 1
    return {"joined": joined, "seconds": round(time.monotonic() - begin_s, 2)}
