"""Read from a run's store whether its ranks train and which generation has settled: a JSON line at every change.

`python -m uneven.launch.watch.observe FOLDER`, started by `uneven chaos` with the run's private folder. A process of
its own, since the store's client needs torch, and complains when the store goes with the run. It ends with the run, or
with the process that started it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from uneven.comm.store import Store, get_text, reach_store
from uneven.launch.heartbeat import heartbeat_key

POLL_S = 0.02


def observe(store: Store, members: list[str]) -> dict[str, Any]:
    """What the store says now."""
    generation = int(get_text(store, "generation") or 0)
    return {
        "is_training": all(_is_training(get_text(store, heartbeat_key(member))) for member in members),
        "generation": generation,
        "is_settled": generation == 0 or _is_settled(store, generation),
    }


def _is_training(heartbeat: str | None) -> bool:
    """Whether this rank has taken a step, or says that the run could go on without it."""
    status = json.loads(heartbeat) if heartbeat else {}
    return bool("min_ranks" in status or status.get("slot") or status.get("rounds", {}).get("round"))


def _is_settled(store: Store, generation: int) -> bool:
    roster = get_text(store, f"roster/{generation}")
    members = json.loads(roster)["members"] if roster else []
    return bool(members) and all(get_text(store, f"settled/{generation}/{member}") is not None for member in members)


def main(folder: Path) -> None:
    parent = os.getppid()
    plan = json.loads((folder / "plan-0.json").read_text())
    host, port = plan["store"]
    store = reach_store(host, port)
    told: dict[str, Any] = {}
    while os.getppid() == parent:
        try:
            seen = observe(store, plan["members"])
        except RuntimeError:  # the store is gone, and with it the run
            return
        # Once all have trained they do: one that is lost sends no heartbeat any more.
        seen["is_training"] |= told.get("is_training", False)
        if seen != told:
            print(json.dumps(seen), flush=True)
            told = seen
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
