"""docs/cli.md is what tools/cli_page.py makes of the commands as they are."""

import runpy
from pathlib import Path

from rich.text import Text
from typer.main import get_command

from uneven.cli.main import app

ROOT = Path(__file__).parent.parent


def test_the_page_of_all_verbs_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "cli_page.py"))["make_page"]()
    written = (ROOT / "docs" / "cli.md").read_text()
    assert written == made, "make it again: python tools/cli_page.py docs/cli.md"


def test_it_names_every_verb_and_every_exit_code() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for verb in (
        "run",
        "devices",
        "diagnose",
        "demo",
        "data get",
        "data list",
        "state show",
        "bench run",
        "bench sweep",
    ):
        assert f"\n## uneven {verb}\n" in page
    for code in (0, 1, 2, 3, 130):
        assert f"\n| {code} | " in page


def test_no_help_loses_its_brackets() -> None:
    """Rich reads [ray] as markup: `uneven run --help` said pip install 'uneven'."""
    page = runpy.run_path(str(ROOT / "tools" / "cli_page.py"))
    for path, command in page["_verbs"](("uneven",), get_command(app)):
        texts = {"help": command.help, **{one.name: getattr(one, "help", None) for one in command.params}}
        for name, text in texts.items():
            shown = Text.from_markup(text or "").plain
            assert shown == (text or "").replace("\\[", "["), f"{' '.join(path)}: {name}"
