"""The site of `make docs`: every page is in its navigation, and nothing in it comes from the network."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFIG = (ROOT / "mkdocs.yml").read_text()
GENERATED = {"index.md", "contributing.md", "changelog.md"}  # from the root of the repository: tools/site_hooks.py


def test_every_page_is_in_the_navigation() -> None:
    pages = re.findall(r"^ +- [\w ]+: (\S+\.md)$", CONFIG, flags=re.MULTILINE)
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages) == sorted(written | GENERATED)


def test_every_public_name_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "api.md").read_text()
    homes = re.findall(r'^    "(\w+)": "([\w.]+)",$', (ROOT / "uneven" / "__init__.py").read_text(), flags=re.MULTILINE)
    assert len(homes) >= 9
    shown = re.findall(r"^::: (\S+)$", reference, flags=re.MULTILINE)
    assert [name for name, home in homes if f"{home}.{name}" not in shown and home not in shown] == []


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the site needs mkdocs: make docs")
def test_the_site_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200)
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 15
    for path in [*pages, *tmp_path.rglob("*.css")]:
        text = path.read_text()
        loads = re.findall(r"<(?:script|img|iframe)[^>]+src=.?(?:https?:)?//|@import|url\(.?(?:https?:)?//", text)
        assert loads == [], path
        assert re.findall(r"<link[^>]+stylesheet[^>]+href=.?(?:https?:)?//", text) == [], path
