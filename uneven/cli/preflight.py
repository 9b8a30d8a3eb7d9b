"""`uneven preflight`: everything that is checked before a run, without the run, on this machine or on several."""

import inspect
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from uneven.cli import complete
from uneven.cli.run import CONFIG_OPTION, MACHINE_OPTIONS, MODULE_OPTION, find_sources, read_machines
from uneven.launch.find_script import Script, find_script, refuse_no_file


def preflight(
    script: Path | None = None,
    devices: str | None = None,
    as_json: bool = False,
    skip: str | None = None,
    module: bool = False,
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
    from uneven.errors import InputError
    from uneven.launch.nodes.lead import CHECKED, lead_script

    if found is None:
        raise InputError("preflight --nodes needs the script, which the machines compare: uneven preflight train.py")
    settings = {"devices": devices, **({} if skip is None else {"skip": skip})}
    facts = lead_script(found, settings, machines, is_check=True)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print(f"uneven: {CHECKED}", file=sys.stderr)


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
        print(json.dumps({"machines": [facts], "warnings": warnings}, indent=2))
        return
    print(*table.lines([facts]), *(f"warning: {line}" for line in warnings), "All is well.", sep="\n")


def _give_options() -> None:
    """The options of several machines are those of `uneven run`."""
    kinds = {
        "script": Annotated[Path | None, typer.Argument(help="The script that is to be trained.")],
        "devices": Annotated[
            str | None,
            typer.Option("--devices", help="Of this machine, as in cuda:0,cpu.", autocompletion=complete.devices),
        ],
        "module": MODULE_OPTION,
        "config": CONFIG_OPTION,
        "as_json": Annotated[bool, typer.Option("--json", help="Print JSON.")],
        "skip": Annotated[
            str | None, typer.Option("--skip", help="Checks to leave out, as in clock,links.", metavar="CHECK,...")
        ],
    }
    defaults = {"script": None, "devices": None, "module": False, "as_json": False, "skip": None}
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if name == "script" else inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=kind,
        )
        for name, kind in {**kinds, **MACHINE_OPTIONS}.items()
    ]
    preflight.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    preflight.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


_give_options()
