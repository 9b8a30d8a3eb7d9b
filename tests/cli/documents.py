"""A document that a verb printed with --json is held against its type, of which the page docs/json.md is made."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


def load_tool() -> Any:
    spec = spec_from_file_location("json_page", Path(__file__).parents[2] / "tools" / "json_page.py")
    assert spec is not None
    assert spec.loader is not None
    tool = module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


JSON_PAGE = load_tool()


def check_document(verb: str, document: Any) -> None:
    assert list(JSON_PAGE.mismatches(JSON_PAGE.DOCUMENTS[verb], document)) == []
