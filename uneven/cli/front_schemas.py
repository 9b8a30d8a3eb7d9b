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
    "python_version": "text?|3.11.7",
    "is_active": "bool|true",
    "kind": "text|CUDA 12.6",
    "support": "object?|",
    "covers": "bool?|true",
}
_BUILD_PLAN = {
    "name": "text|cu126",
    "variant": "text|cu126",
    "torch": "text|torch==2.8.0",
    "index_url": "text?|",
    "uneven": ["text|uneven"],
    "folder": "text|/home/me/.local/share/uneven/torch/cu126",
    "download_bytes": "whole?|2600000000",
    "disk_bytes": "whole?|5400000000",
    "commands": ["any|python -m venv ..."],
}
_SOURCE_PLAN = {
    "name": "text|source-61-120",
    "torch": "text|2.8.0",
    "archs": ["text|6.1"],
    "toolkit": {"needed": "text|CUDA 12.8", "found": "text?|/usr/local/cuda"},
    "jobs": "whole|8",
    "estimated": {"hours": "number|3.5", "disk_bytes": "whole|60000000000", "how": "text|by jobs and archs"},
    "steps": [
        {"name": "text|build", "command": ["text|python"], "environment": "object|", "done": "bool|false"},
    ],
    "missing": ["text|nvcc"],
    "notes": ["text|a note"],
    "log": "text|build.log",
    "state": "text|steps.json",
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
        "version": "text|0.1.0",
        "machine": "object|",
        "advice": "object|",
        "environment": "object?|",
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
        "current": "object?|",
    },
    "torch info": _BUILD,
    "torch install": (_BUILD, _BUILD_PLAN),
    "torch activate": {"active": "text?|cu126"},
    "torch remove": {"removed": "text|cu126"},
    "torch build": (
        {
            "name": "text|source-61-120",
            "version": "text|2.8.0",
            "cuda": "text?|12.8",
            "archs": ["text|sm_61"],
            "python": "text|python",
            "wheels": "text|wheels",
        },
        _SOURCE_PLAN,
        {"command": "any|docker run ...", "image": "text|an image", "wheel": "text|a.whl", "afterwards": "text|uneven"},
    ),
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
