"""A document that a verb printed with --json is held against the schema of the page docs/json.md."""

from typing import Any

from uneven.cli.schemas import SCHEMAS, mismatches


def check_document(verb: str, document: Any) -> None:
    assert list(mismatches(SCHEMAS[verb], document)) == []
