"""What docs/graph.md shows is what happens."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from uneven.graph.flow import FlowBuilder
from uneven.graph.graph import Graph

PAGE = Path(__file__).parents[2] / "docs" / "graph.md"
TEXT = PAGE.read_text()
CONSTRAINTS = PAGE.parents[1] / "constraints.txt"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_its_examples_run_and_print_what_it_shows() -> None:
    first, *others = blocks("python")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(first, {})
    # The last line has the hash, which follows torch's own description of its modules: it is that of the pinned torch.
    is_pinned = f"torch=={torch.__version__.partition('+')[0]}\n" in CONSTRAINTS.read_text()
    same = None if is_pinned else -1
    assert shown.getvalue().splitlines()[:same] == blocks("text")[0].splitlines()[:same]
    for block in others:
        with contextlib.redirect_stderr(io.StringIO()):
            exec(block, {"torch": torch})


def test_it_names_every_verb_and_everything_a_graph_can_do() -> None:
    for kind in (FlowBuilder, Graph):
        own = [name for name in vars(kind) if not name.startswith("_") and name not in ("forward", "extra_repr")]
        assert [name for name in own if not re.search(rf"\b{name}\b", TEXT)] == ["check_structure"] * (kind is Graph)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", TEXT))))
def test_every_link_leads_somewhere(link: str) -> None:
    assert (PAGE.parent / link).is_file()
