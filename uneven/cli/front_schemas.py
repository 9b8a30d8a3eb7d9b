"""The documents of the verbs that one meets first (setup, torch, init, plan, simulate) and of those about runs that are
on (status, stop, logs), in the notation of cli/schemas.py."""

from typing import Any

_BUILD = {
    "name": "text|cu126",
    "version": "text|2.8.0+cu126",
    "cuda": "text?|12.6",
    "hip": "text?|",
    "archs": ["text|sm_86"],
    "size_bytes": "whole|5400000000",
    "python": "text|/home/me/.local/share/uneven/torch/cu126/bin/python",
    "source": "text|the package index",
    "is_active": "bool|true",
    "support": "object?|",
    "covers": "bool?|true",
}
_BUILD_PLAN = {
    "name": "text|cu126",
    "source": "text|torch>=2.8,<2.15 of cu126",
    "folder": "text|/home/me/.local/share/uneven/torch/cu126",
    "commands": ["text|python -m venv ..."],
}
_SOURCE_PLAN = {
    "name": "text|sm61-sm120",
    "torch": "text|2.13.0",
    "archs": "text|6.1;12.0",
    "toolkit": "text?|/usr/local/cuda-12.8",
    "jobs": "whole|8",
    "commands": ["text|git init ..."],
    "missing": ["text|nvcc"],
    "log": "text|build.log",
}
_SIMULATED = {
    "policy": "text|async",
    "seconds": "number|3600.0",
    "seconds_per_epoch": "number?|120.0",
    "samples": "number|5000000",
    "samples_per_s": "number|1400.0",
    "efficiency": "number|0.95",
    "rounds": "whole|900",
    "time": {"*": "number|0.9"},
    "kinds": [{"name": "text|fast", "count": "whole|8", "share": "number|0.7", "time": {"*": "number|0.9"}}],
    "limits": "any|",
    "failures": "any|",
    "joins": "any|",
    "trained_again": "any|",
    "counts": "any|",
    "shares": ["number|0.1"],
    "over_time": "any|",
}
FRONT: dict[str, Any] = {
    "setup": {
        "machine": "object|",
        "advice": "object|",
        "environment": "text|/home/me/project/.venv",
        "command": "any|",
        "installed": "bool|false",
        "checks": "any|",
    },
    "torch list": {
        "folder": "text|/home/me/.local/share/uneven/torch",
        "active": "text?|cu126",
        "gpus": [{"index": "whole|0", "name": "text|a GPU", "sm": "text?|sm_86"}],
        "builds": [_BUILD],
        "unfinished": ["text|cu128"],
        "current": "text?|2.13.0+cpu",
    },
    "torch install": (_BUILD, _BUILD_PLAN),
    "torch activate": {"active": "text?|cu126"},
    "torch remove": {"removed": "text|cu126"},
    "torch build": ({**_BUILD, "wheels": "text|wheels"}, _SOURCE_PLAN),
    "init": {
        "name": "text|demo",
        "folder": "text|/home/me/demo",
        "template": "text|vision",
        "files": ["text|train.py"],
        "python": "text|3.11",
        "torch": "text?|2.8.0",
        "devices": ["text|cpu"],
        "written": "bool|true",
        "next": ["text|cd demo && make test"],
    },
    "plan": {
        "version": "whole|1",
        "date": "text|2026-11-17T14:19:54+00:00",
        "uneven": "text|0.1.0",
        "asked": "object|",
        "recommendation": "object|",
        "predicted": "object|",
        "achieved": "object?|",
        "predictions": ["object|"],
        "strategies": ["object|"],
        "notes": ["text|a note"],
        "probe": "object|",
    },
    "simulate": (
        {
            "title": "text|two GPUs",
            "ranks": "whole|2",
            "machines": "whole|1",
            "samples_per_s_alone": "number|1500.0",
            "results": [_SIMULATED],
        },
        {"points": [{"ranks": "whole|64", **_SIMULATED}]},
    ),
    "status": {"runs": ["object|"]},
    "stop": {
        "stopped": [
            {"id": "text|k3f9ad1", "script": "text?|train.py", "result": "text?|stopped", "saved": "text?|runs/my-run"}
        ],
        "failed": ["text|why"],
    },
    "logs": {
        "id": "text|k3f9ad1",
        "lines": [{"time": "text|2026-11-17T14:19:54.123", "rank": "whole?|1", "text": "text|epoch 1"}],
    },
}
