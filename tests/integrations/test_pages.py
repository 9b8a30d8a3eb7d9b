"""The pages show what the examples are: the lines that uneven adds, and commands that exist. Needs no framework."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "scripts"),
    [("transformers", ("hf_trainer", "hf_sft_lora")), ("accelerate", ("accelerate_loop",))],
    ids=["transformers", "accelerate"],
)
def test_a_page_adds_the_two_lines_that_its_examples_mark(page: str, scripts: tuple[str, ...]) -> None:
    text = (ROOT / "docs" / "integrations" / f"{page}.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", text, flags=re.DOTALL)
    added = re.findall(r"^\+(.+)$", diff, flags=re.MULTILINE)
    assert len(added) == 2
    for script in scripts:
        source = (ROOT / "examples" / f"{script}.py").read_text()
        assert re.findall(r"^(.+)  # uneven$", source, flags=re.MULTILINE) == added
        assert f"examples/{script}.py" in text
