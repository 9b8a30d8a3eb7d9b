"""The command `uneven`: one module per verb, which parses its options, calls the library and prints the result.

Nothing here imports torch: verbs that need it import it inside, so that `uneven --help` stays instant. `main` is the
one place where an error becomes an exit code; tests/cli/test_exit_codes.py holds it for every verb.
"""

import sys
from types import TracebackType
from typing import Annotated

import typer

import uneven
from uneven.cli import bench, data, state
from uneven.cli.chaos import chaos
from uneven.cli.demo import demo
from uneven.cli.devices import devices
from uneven.cli.diagnose import diagnose
from uneven.cli.join import join
from uneven.cli.preflight import preflight
from uneven.cli.run import run
from uneven.cli.scaling import scaling
from uneven.cli.strategies import strategies
from uneven.cli.sweep import check, compare, policies, report, sweep
from uneven.errors import STOPPED, InputError, MachineError, RankError
from uneven.launch.lifeline import end_with_parent
from uneven.launch.user_frames import show_user_frames

EXIT_CODES = (
    "Exit codes of every verb: 0 done, 1 failed, 2 bad input, 3 this machine or cluster cannot, "
    "130 stopped by Ctrl-C, 143 by SIGTERM, and saved. "
    "Messages go to stderr; with --json stdout holds one JSON document, or nothing where there is no result."
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one PyTorch model on hardware that does not match: samples by speed, bytes by memory, nobody waits.",
    epilog=EXIT_CODES,
)
app.add_typer(data.app, name="data")
app.add_typer(state.app, name="state")
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
app.command("join")(join)
app.command("chaos")(chaos)
app.command("preflight")(preflight)
app.command("devices")(devices)
app.command("diagnose")(diagnose)


def main() -> None:
    """Run the command line; a failure the user can do something about is a message on stderr and its exit code."""
    end_with_parent()
    try:
        app()
    except (InputError, MachineError, RankError) as error:
        print(f"uneven: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except Exception:
        sys.excepthook = _print_from_users_frame  # here, because typer sets its own when the app is called
        raise


def _print_from_users_frame(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Any other exception is of the user's script, or a defect of ours: the traceback begins with the script."""
    del traceback
    show_user_frames(error)
    sys.__excepthook__(kind, error, error.__traceback__)
