"""The command `uneven`: one module per verb; each parses, calls and prints.

Nothing here imports torch: verbs that need it import it inside, so that `uneven --help` stays instant.
"""

import sys
from typing import Annotated

import typer

import uneven
from uneven.cli import bench, data
from uneven.cli.demo import demo
from uneven.cli.devices import devices
from uneven.cli.diagnose import diagnose
from uneven.cli.run import run
from uneven.cli.scaling import scaling
from uneven.cli.strategies import strategies
from uneven.cli.sweep import check, compare, policies, report, sweep
from uneven.errors import InputError, MachineError, RankError
from uneven.launch.lifeline import end_with_parent

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one PyTorch model on hardware that does not match: samples by speed, bytes by memory, nobody waits.",
)
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")
app.command("demo")(demo)
for verb in (sweep, report, compare, check, policies, scaling, strategies):
    bench.app.command(verb.__name__)(verb)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"uneven {uneven.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


app.command("run")(run)
app.command("devices")(devices)
app.command("diagnose")(diagnose)


def main() -> None:
    """Run the command line; a known failure is one line on stderr, exit code 2 (input) or 1 (machine)."""
    end_with_parent()
    try:
        app()
    except InputError as error:
        print(f"uneven: {error}", file=sys.stderr)
        sys.exit(2)
    except (MachineError, RankError) as error:
        print(f"uneven: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
