"""The typer app of the command line. A verb's module is imported when the verb is called, completed or asked for help.

`uneven.cli.main` runs it; tests and tools/cli_page.py read the commands from it.
"""

import select
import sys
from collections.abc import Iterator, MutableMapping
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

import uneven
from uneven.cli.verbs import ABOUT, EXIT_CODES, Verb, all_verbs, first_screen, is_colored
from uneven.errors import InputError

_KEPT = (" ", "uneven ", "- ")  # lines of examples and of lists


class Commands(MutableMapping[str, Any]):
    """The commands of the app by name, each made when it is first looked up."""

    def __init__(self) -> None:
        self._verbs = all_verbs()
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = load(self._verbs[name])
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._verbs

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._verbs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._verbs)

    def __len__(self) -> int:
        return len(self._verbs)


def load(verb: Verb) -> Any:
    """The command of a verb, with its sub-verbs where it has some."""
    module, _, name = verb.place.partition(":")
    found = getattr(import_module(module), name)
    around = typer.Typer(add_completion=False)
    around.callback()(lambda: None)
    if isinstance(found, typer.Typer):
        around.add_typer(found, name=verb.name)
    else:
        around.command(verb.name)(found)
    command = get_group(around).commands[verb.name]
    _join_lines(command)
    return command


def _join_lines(command: Any) -> None:
    """The lines of a paragraph become one, so that the terminal's width breaks them and not that of our files."""
    if command.help is not None:
        paragraphs = [paragraph.split("\n") for paragraph in cleandoc(command.help).split("\n\n")]
        is_kept = [any(line.startswith(_KEPT) for line in lines) for lines in paragraphs]
        joined = [("\n" if keep else " ").join(lines) for keep, lines in zip(is_kept, paragraphs, strict=True)]
        command.help = "\n\n".join(joined)
    for child in getattr(command, "commands", {}).values():
        _join_lines(child)


class Carried(Exception):  # noqa: N818
    """Takes an error of a script past typer, which would end EOFError as "Aborted." and a broken pipe without a word.

    `uneven.cli.main` raises what it carries.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _is_output_closed() -> bool:
    """Whether the reader of stdout or stderr is gone, as after `| head -1`."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


class Root(TyperGroup):
    """`uneven` itself: its help is the first screen, without loading a verb or rich."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`uneven` alone shows the first screen too; the exit code says that nothing was done."""
        if not args and not ctx.resilient_parsing:
            typer.echo(first_screen(is_colored(sys.stdout)))
            ctx.exit(InputError.exit_code)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """A script's own EOFError or broken pipe keeps its traceback: a truncated file, a worker that died."""
        try:
            return super().invoke(ctx)
        except EOFError as error:
            raise Carried(error) from None
        except BrokenPipeError as error:
            if _is_output_closed():
                raise
            raise Carried(error) from None

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(self.commands)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """The names of the verbs are offered from the table: a press of the tab key loads no verb."""
        commands = self.commands
        lines = {name: verb.help for name, verb in all_verbs().items()}
        self.commands = {name: TyperCommand(name, help=line, short_help=line) for name, line in lines.items()}
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self.commands = commands

    def format_help(self, ctx: Any, formatter: Any) -> None:
        del ctx
        formatter.write(first_screen(is_colored(sys.stdout)) + "\n")


app = typer.Typer(
    cls=Root,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=ABOUT,
    epilog=EXIT_CODES,
)


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
