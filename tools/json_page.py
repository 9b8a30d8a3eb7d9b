"""Write docs/json.md: what every verb prints with --json, from the schemas in uneven/cli/schemas.py.

    python tools/json_page.py docs/json.md

tests/cli/test_json.py fails if the committed page differs from the output of this script.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uneven.cli.schemas import SCHEMAS, example
from uneven.cli.verbs import all_verbs

HEAD = """# JSON of every verb

With `--json` a verb prints one JSON document to stdout and nothing else; messages and progress go to stderr. If a verb
fails, stdout is empty, the message is on stderr, and the [exit code](cli.md#exit-codes) says what kind of failure it
is. Verbs whose result is a verdict always print their document, and the exit code says whether all is well: `config
check` (2), `bench check`, `state diff` and `chaos` (1), `diagnose` (3). `run` also prints it for a run that was stopped
(130, 143).

    uneven run train.py --devices cpu,cpu@0.4 --json | jq '.runs[0].metrics'
    uneven devices --json | jq -r '.devices[].device'

`tools/json_page.py` makes this page from the schemas in `uneven/cli/schemas.py`; tests compare real outputs with them.
New keys may be added; existing keys keep their names and types. Types: text, number, whole (a whole number), bool,
object (with keys that vary), any, list of a type. "or null" means that the value may be null, "may be absent" that the
key may be missing. `[]` stands for each entry of a list, `*` for any key. A metric that is NaN or infinite is null,
because JSON has no such numbers.
"""


def make_page() -> str:
    known = all_verbs()
    return HEAD + "".join(
        _section(verb, schema) for verb, schema in sorted(SCHEMAS.items()) if verb.split()[0] in known
    )


def _section(verb: str, schema: Any) -> str:
    kinds = schema if isinstance(schema, tuple) else (schema,)
    parts = [f"\n## uneven {verb}\n"]
    for number, kind in enumerate(kinds):
        parts.append("" if number == 0 else "\nOr:\n")
        rows = "".join(f"| `{key}` | {words} |\n" for key, words in _rows(kind, ""))
        parts.append(f"\n| key | type |\n|---|---|\n{rows}")
        parts.append(f"\n```json\n{json.dumps(example(kind), indent=1)}\n```\n")
    return "".join(parts)


def _rows(schema: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(schema, list):
        if isinstance(schema[0], str):
            yield place, f"list of {_words(schema[0])}"
        else:
            yield from _rows(schema[0], f"{place}[]")
    elif isinstance(schema, dict):
        for key, entry in schema.items():
            where = f"{place}.{key.removesuffix('?')}".lstrip(".")
            rows = list(_rows(entry, where))
            if key.endswith("?"):
                is_leaf = len(rows) == 1 and rows[0][0] == where
                kind = rows[0][1] if is_leaf else "list" if isinstance(entry, list) else "object"
                rows = [(where, f"{kind}, may be absent"), *rows[is_leaf:]]
            yield from rows
    else:
        yield place, _words(schema)


def _words(leaf: str) -> str:
    kind = leaf.partition("|")[0]
    return f"{kind.removesuffix('?')} or null" if kind.endswith("?") else kind


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_page())
