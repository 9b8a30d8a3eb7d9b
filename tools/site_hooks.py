"""Hooks of mkdocs for `make docs`: add the pages at the root of the repository, and adapt links and doctests.

The pages are written for the repository, where a link to a source file opens that file. The site has no source files,
so such a link becomes plain text.
"""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are at the root of the repository."""
    for source, page in PAGES.items():
        content = re.sub(r"\]\(docs/", "](", (ROOT / source).read_text())
        files.append(File.generated(config, page, content=content))
    return files


class FenceDoctests(griffe.Extension):  # type: ignore[misc]
    """Show the doctests of docstrings as code; Markdown alone would take `>>>` for a quotation."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            doctest = re.compile(r"(?:^[ ]*>>>.*\n?(?:^(?![ ]*$).*\n?)*)+", flags=re.MULTILINE)
            obj.docstring.value = doctest.sub(
                lambda match: f"\n```python\n{match[0].rstrip()}\n```\n", obj.docstring.value
            )


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to the generated pages, and turn links to files outside the site into text."""
    for source, target in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{source}(#[^)]*)?\)", rf"]({target}\1)", markdown)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)?(?:examples|tools|tests|uneven|LICENSE)[^)]*\)", r"\1", markdown)
