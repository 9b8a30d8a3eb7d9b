"""What every verb prints with --json: its keys, their types, and an example of each value. docs/json.md is made of it.

A schema is written as the document itself, with 'type|example' in the place of a value: text, number, whole (a whole
number), bool, object (with keys of its own) or any; 'text?|' may be null as well. A key that ends in '?' may be absent,
{'*': ...} has keys of any name, [...] is a list of one kind of entry. A verb with several documents has a tuple of
them. tests/cli/test_json.py holds real outputs against them; `mismatches` is how.
"""

import json
from collections.abc import Iterator
from typing import Any

from uneven.cli.bench_schemas import BENCH, INTERFERENCE, YARDSTICK
from uneven.cli.front_schemas import FRONT

Schema = Any
_STATE = {
    "name": "text|epoch-2",
    "path": "text|runs/my-run/epoch-2",
    "kind": "text|checkpoint",
    "whole": "bool|true",
    "fault": "text?|",
    "bytes": "whole|12701",
    "slot?": "whole?|500",
    "samples?": "whole?|16000",
    "epochs?": "number?|2.0",
    "finished?": "bool?|false",
    "stopped?": "text?|",
    "cause?": "text?|interval",
    "ledger?": "object?|",
    "metrics?": {"*": "number?|0.97"},
    "params?": "whole?|61706",
    "tensors?": "whole?|10",
    "files?": "object?|",
    "ranks?": "whole?|2",
    "devices?": "any|cpu,cpu@0.4",
    "policy?": "text?|balanced",
    "version?": "whole?|2",
    "versions?": {"*": "text|2.13.0"},
    "date?": "text?|2026-11-17T14:19:54+00:00",
}
_PROBLEM = {
    "line": "whole?|2",
    "key": "text?|epohcs",
    "message": "text|unknown setting 'epohcs'; did you mean 'epochs'?",
}
_SET_PLACE = "any|/home/me/.cache/uneven/mnist"
SCHEMAS: dict[str, Schema] = {
    "diagnose": {
        "version": "text|0.1.0",
        "system": "object|",
        "gpus": "object|",
        "torch": "object|",
        "compatibility": ["object|"],
        "precision": [
            {"device": "text|cpu", "name": "text|a processor", "precision": "text|fp32", "why": "text|no native bf16"}
        ],
        "backends": {"gloo": "bool|true", "nccl": "bool|false", "nccl_version": "text?|"},
        "network": {"interfaces": ["object|"], "likely": "text?|eth0", "why": "text|it has the default route"},
        "problems": ["object|"],
        "notes": ["text|no NVIDIA GPU: no NVIDIA driver"],
        "advice": "object|",
        "builds": "any|",
    },
    "devices": {
        "version": "text|0.1.0",
        "devices": [
            {
                "device": "text|cpu@0.4",
                "name": "text?|a processor",
                "memory_bytes": "whole?|25274793984",
                "arch": "text?|x86_64",
                "cores": "whole?|2",
                "pinned_to?": ["whole|1"],
                "samples_per_s?": "number|8123.0",
                "slowest?": "number|7990.0",
                "fastest?": "number|8201.0",
            }
        ],
        "notes": ["text|a note"],
        "measured?": YARDSTICK,
    },
    "demo": {
        "model": "text|lenet",
        "data": "text|mnist-mini",
        "devices": ["text|cpu"],
        "modes": [
            {
                "mode": "text|cpu-async",
                "accuracy": "number|0.951",
                "seconds": "number|14.2",
                "samples_per_s": "number|2112.0",
                "speedup": "number?|1.35",
                "efficiency": "number?|0.97",
                "shares": ["number|0.71"],
                "is_disturbed": "bool|false",
                "interference": INTERFERENCE,
            }
        ],
        "page": "text?|runs/demo/demo.html",
        "measured": "object?|",
        "sentence": "text?|async gave 1.35 times the speed of the fast device alone",
        "doubt": "text?|",
        "disturbed": ["text|solo-0"],
        "failures": {"*": "text|why"},
        "skipped": {"*": "text|why"},
        "missing": ["text|torch-ddp"],
        "epochs": "whole|3",
        "samples": "whole?|",
        "seed": "whole|0",
        "out": "text|runs/demo",
        "notes": ["text|a note"],
        "interrupted": "bool|false",
    },
    "run": {
        "script": "text|train.py",
        "seconds": "number|31.4",
        "runs": [
            {
                "policy": "text|balanced",
                "devices": "text|cpu,cpu@0.4",
                "finished": "bool|true",
                "stopped": "text?|",
                "epochs": "whole|3",
                "steps": "whole|471",
                "samples": "whole|30000",
                "rank_samples": ["whole|21400"],
                "train_seconds": "number|14.2",
                "samples_since_start": "whole|30000",
                "samples_per_s": "number?|2112.0",
                "disturbed": "bool?|false",
                "took_part": [
                    {
                        "device": "text|cpu@0.4",
                        "samples": "whole?|8600",
                        "ended": "object?|",
                    }
                ],
                "metrics": {"*": "number?|0.12"},
                "out": "text?|runs/my-run",
            }
        ],
    },
    "join": {
        "leader": "text|192.0.2.10:29400",
        "devices": "text|auto",
        "seconds": "number|612.4",
    },
    "leave": {
        "run": "whole|4711",
        "script": "text?|train.py",
        "left?": "text|rank 2 has left",
        "refused?": "text|it is the only rank of the machine that leads",
    },
    "preflight": {"machines": ["object|"], "warnings?": ["text|a warning"], "links?": "any|", "notes?": "any|"},
    "chaos": {
        "version": "whole|1",
        "seed": "whole|0",
        "ranks": "whole|3",
        "exit_code": "whole?|0",
        "seconds": "number|61.0",
        "stopped": "bool|false",
        "faults": [{"at_s": "number|10.0", "rank": "whole|1", "kind": "text|kill", "settled_s": "number?|0.8"}],
        "settled": "object?|",
        "generations": ["object|"],
        "samples": "object?|",
        "trained_again": "whole?|0",
        "exactly_once": "bool|true",
        "right": "bool|true",
    },
    "state show": {"folder": "text|runs/my-run", "newest_whole": "text?|runs/my-run/epoch-2", "states": [_STATE]},
    "state diff": {
        "a": {"folder": "text|runs/a", "kind": "text|result", "slot": "whole?|500"},
        "b": {"folder": "text|runs/b", "kind": "text|result", "slot": "whole?|500"},
        "equal": "bool|false",
        "settings": {"*": ["any|0"]},
        "position": {"*": ["any|500"]},
        "tensors": [
            {
                "group": "text|model",
                "name": "text|layer.bias",
                "equal": "bool|false",
                "only_in?": "text|a",
                "shapes?": [["whole|2"]],
                "shape?": ["whole|2"],
                "dtypes?": ["text|torch.float32"],
                "max_abs?": "number|0.001",
                "max_rel?": "number|0.01",
                "not_finite?": "whole|0",
            }
        ],
    },
    "state export": {
        "file": "text|model.safetensors",
        "from": "text|runs/my-run",
        "kind": "text|result",
        "slot": "whole?|500",
        "tensors": "whole|10",
        "bytes": "whole|248000",
    },
    "data list": {
        "folder": "text|/home/me/.cache/uneven",
        "sets": [
            {
                "name": "text|mnist",
                "title": "text|handwritten digits",
                "bytes": "whole|11594722",
                "here": "bool|true",
                "where": _SET_PLACE,
                "licence": "text|CC BY-SA 3.0",
            }
        ],
    },
    "data get": {
        "name": "text|mnist",
        "bytes": "whole|11594722",
        "source": "text?|ossci-datasets.s3.amazonaws.com",
        "where": _SET_PLACE,
        "seconds": "number|3.2",
    },
    "config show": {
        "script": "text|train.py",
        "file": "text?|run.toml",
        "settings": {
            "*": {
                "value": "any|5",
                "source": "text|file",
                "where": "text?|run.toml",
                "default": "any|",
                "script": "any|2",
            }
        },
    },
    "config check": {
        "file": "text|run.toml",
        "settings": {"*": "any|3"},
        "problems": [_PROBLEM],
        "notes": [_PROBLEM],
    },
    "completion": {
        "shell": "text|bash",
        "install": 'text|eval "$(uneven completion bash)"',
        "script": "text|_uneven_completion() { ...",
    },
    **FRONT,
    **BENCH,
}


def mismatches(schema: Schema, value: Any, place: str = "") -> Iterator[str]:
    """Where a document is not as its schema says, in words; nothing where it is."""
    if isinstance(schema, tuple):
        tried = [list(mismatches(one, value, place)) for one in schema]
        yield from min(tried, key=len)
    elif isinstance(schema, str):
        if not _fits(schema.partition("|")[0], value):
            yield f"{place or 'the document'} is {value!r}, not {schema.partition('|')[0]}"
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{place or 'the document'} is no list"
            return
        for number, entry in enumerate(value):
            yield from mismatches(schema[0], entry, f"{place}[{number}]")
    elif not isinstance(value, dict):
        yield f"{place or 'the document'} is no object"
    elif "*" in schema:
        for key, entry in value.items():
            yield from mismatches(schema["*"], entry, f"{place}.{key}".lstrip("."))
    else:
        known = {key.removesuffix("?"): entry for key, entry in schema.items()}
        yield from (f"{place} lacks {key}".lstrip() for key in schema if not key.endswith("?") and key not in value)
        yield from (f"{place} has {key}, which is not in the schema".lstrip() for key in value if key not in known)
        for key in known.keys() & value.keys():
            yield from mismatches(known[key], value[key], f"{place}.{key}".lstrip("."))


def _fits(kind: str, value: Any) -> bool:
    if kind == "any" or (kind.endswith("?") and value is None):
        return True
    types = {"text": str, "number": int | float, "whole": int, "bool": bool, "object": dict}
    is_right = isinstance(value, types[kind.removesuffix("?")])
    return is_right and (isinstance(value, bool) == (kind.removesuffix("?") == "bool"))


def example(schema: Schema) -> Any:
    """A document that the schema describes; keys that may be absent are there."""
    if isinstance(schema, tuple):
        return example(schema[0])
    if isinstance(schema, list):
        return [example(schema[0])]
    if isinstance(schema, dict):
        return {"name" if key == "*" else key.removesuffix("?"): example(entry) for key, entry in schema.items()}
    kind, _, text = schema.partition("|")
    if kind.removesuffix("?") == "object":
        return {}
    if not text:
        return None
    return text if kind.removesuffix("?") in ("text", "any") else json.loads(text)
