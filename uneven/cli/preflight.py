"""`uneven preflight`: everything that is checked before a run, without the run, on this machine or on several."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from uneven.cli import complete
from uneven.cli.options import CONFIG, MACHINE_OPTIONS, Module, find_sources, read_machines, with_options
from uneven.cli.output import Json, print_json, say
from uneven.errors import InputError
from uneven.files import ABSENT
from uneven.launch.find_script import Script, find_script, refuse_no_file


@dataclass(frozen=True)
class Checked:
    """What --json prints: of one machine with its warnings, of several with the links between them."""

    machines: list[dict[str, Any]]
    warnings: list[str] | None = field(default=None, metadata=ABSENT)
    links: Any = field(default=None, metadata=ABSENT)


@with_options({"config": CONFIG, **MACHINE_OPTIONS})
def preflight(
    script: Annotated[Path | None, typer.Argument(help="The script that is to be trained.")] = None,
    devices: Annotated[
        str | None,
        typer.Option("--devices", help="Of this machine, as in cuda:0,cpu.", autocompletion=complete.devices),
    ] = None,
    module: Module = False,
    as_json: Json = False,
    skip: Annotated[
        str | None, typer.Option("--skip", help="Checks to leave out, as in clock,links.", metavar="CHECK,...")
    ] = None,
    **options: Any,
) -> None:
    """Check everything that a run needs, without training: versions, devices, number formats, code, memory, disk,
    links, clocks.

    On one machine torch is loaded only for a GPU. With --nodes or --hosts the machines join by 'uneven join' as for a
    run, are compared, and test every link in both directions. If one does not fit, all end with its name and the fix.
    Data sets and models are compared at the start of a run, when the script has made them.

    Exit codes: 0 all is well, 1 the machines do not fit together, 2 bad input, 3 this machine cannot.

    Examples:

      uneven preflight train.py

      uneven preflight train.py --nodes 2         (and on the other machine the line that it prints)
    """
    found = None if script is None else find_script(script, [], module)
    # As the run will have them: run.toml and the environment count, too.
    sources = find_sources(found or Script(Path("train.py")), {"devices": devices, "skip": skip, **options})
    devices, skip = sources["devices"].value, sources["skip"].value
    machines = read_machines(options, skip)
    if machines is None:
        _check_here(found, devices, as_json)
        return
    from uneven.launch.nodes.lead import CHECKED, lead_script

    if found is None:
        raise InputError("preflight --nodes needs the script, which the machines compare: uneven preflight train.py")
    settings = {"devices": devices, **({} if skip is None else {"skip": skip})}
    facts = lead_script(found, settings, machines, is_check=True)
    if as_json:
        print_json(Checked(**facts))
    else:
        say(CHECKED)


def _check_here(script: Script | None, devices: str, as_json: bool) -> None:
    from uneven.hardware.preflight import refuse_unsupported
    from uneven.launch.local_ranks import own_devices
    from uneven.launch.script import refuse_plain_script
    from uneven.machines import table
    from uneven.machines.code import script_digests
    from uneven.machines.facts import collect_facts

    refuse_unsupported()
    if script is not None:
        refuse_no_file(script.path)
    code = {} if script is None else script_digests(script.path, script.folder, script.package)
    facts = collect_facts(code, [name.strip() for name in devices.split(",")])
    found = own_devices(facts)
    if script is not None and len(found) > 1:
        refuse_plain_script(script, len(found))
    warnings = table.warnings(facts)
    if as_json:
        print_json(Checked([facts], warnings))
        return
    print(*table.lines([facts]), *(f"warning: {line}" for line in warnings), "All is well.", sep="\n")
