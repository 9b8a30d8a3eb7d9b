"""A process that joins a run in progress: what it is told, and whether it fits, before it builds its model.

Rank 0 of every run says in the launcher's store which run of the script is on, and why it cannot be joined where it
cannot. A script that joins begins at its beginning, so only its first run can be joined. The settings are those that
rank 0 has resolved: what `auto` means was decided when the newcomer was not there.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from uneven.comm.fingerprint import describe_tensors, refuse_differences
from uneven.comm.store import Store, get_text, under
from uneven.config import RunConfig
from uneven.errors import RefusedError
from uneven.launch.checks.parity import PER_RANK_SETTINGS, compare_sets, describe_order, describe_sets
from uneven.launch.environment import LaunchEnvironment
from uneven.train import settle
from uneven.train.worker import Worker

RUN = 1  # the run of a script that can be joined
RUN_KEY = "run"
POLL_S = 0.05
OVER, BY_HAND = "it is over", "it is trained by hand"
NAMES = ("rank 0", "the rank that joins")  # which number it gets may change until it is in a roster
CANNOT_BE_JOINED = "this run cannot be joined"


def announce_run(store: Store, run: int, why_not: str) -> None:
    """Which run of the script is on; `why_not`: why nobody can join it, or empty. Written by rank 0."""
    store.set(RUN_KEY, json.dumps({"number": run, "why_not": why_not}))


def why_closed(store: Store) -> str | None:
    """Why the run cannot be joined; None where it can be, and where it has not begun."""
    if (text := get_text(store, RUN_KEY)) is None:
        return None
    found = json.loads(text)
    if found["number"] > RUN:
        return f"the script is in its run {found['number']}, and only its first one can be joined"
    return found["why_not"] or None


def is_run_over(store: Store, run: int) -> bool:
    """Whether this run of the script has its result, or a later one has begun."""
    if (text := get_text(store, RUN_KEY)) is None:
        return False
    found = json.loads(text)
    return bool(found["number"] > run or (found["number"] == run and found["why_not"] == OVER))


def facts_key(run: int) -> str:
    """Where rank 0 writes what somebody who joins must know."""
    return f"run/{run}/facts"


def describe_run(environment: LaunchEnvironment, run: int, worker: Worker, shared: int) -> dict[str, Any]:
    """What this run's ranks know beforehand, for somebody who joins; its data where other machines may come.

    `shared` counts what the ranks of the script have told each other so far.
    """
    config = worker.config
    facts = {"settings": config.to_json(), "shared": shared}
    may_come = run == RUN and environment.door is not None and worker.rank_info.rank == 0
    if may_come and "data" not in config.skipped_checks:
        facts["data"] = describe_sets(worker.task)
    return facts


def await_facts(store: Store) -> dict[str, Any]:
    """What rank 0 tells, once the run has begun; RefusedError where it cannot be joined.

    As long as the launcher lives: this process ends with it, by its heartbeat.
    """
    while True:
        if (why := why_closed(store)) is not None:
            raise RefusedError(f"{CANNOT_BE_JOINED}: {why}")
        if (text := get_text(store, facts_key(RUN))) is not None:
            found: dict[str, Any] = json.loads(text)
            return found
        time.sleep(POLL_S)


def why_not_joined(config: RunConfig | None, worker: Worker | None) -> str:
    """Why nobody can join this run, or empty; its first group has formed."""
    if config is None or worker is None:
        return BY_HAND
    if config.replay is not None:
        return "it is a replay"
    if config.on_fault == "end":
        return "it has on_fault='end'"
    if (why := settle.why_not(worker.engine)) is not None:
        return why
    if worker.membership is None:
        return "it has one rank" if worker.rank_info.world_size == 1 else "a program of its own trains"
    if config.sync_batchnorm and worker.rank_info.world_size == 1:
        return "it began on one device, where sync_batchnorm=True has no effect"
    return settle.why_not_joined(worker.engine) or ""


def adopt_settings(config: RunConfig, facts: Mapping[str, Any]) -> RunConfig:
    """The settings of the run. Where files are is this machine's own; what is resumed comes from the other ranks."""
    theirs = {name: value for name, value in facts["settings"].items() if name not in PER_RANK_SETTINGS}
    return replace(config, **{**theirs, **facts.get("config", {}), "resume": None, "replay": None})


def check_newcomer(environment: LaunchEnvironment, worker: Worker) -> None:
    """RefusedError where the data or the model's tensors are not those of rank 0; the settings are rank 0's own."""
    data, store = describe_order(worker), environment.connect("")
    info, model = worker.rank_info, worker.engine.model
    hosts = ["the leader", info.roster.host(info.rank)]
    known = under(f"run/{RUN}", store)
    facts = json.loads(store.get(facts_key(RUN)))
    # Each of its ranks looks: one that does not fit is refused alone. On the leader's machine all read the same files.
    if "data" in facts and info.roster.machines[info.rank] != 0:
        worker.report.say(compare_sets(hosts[1], facts["data"], describe_sets(worker.task)))
    first = json.loads(known.get("fingerprint/settings/0"))[: len(data)]  # where the data is described first
    refuse_differences([first, data], "has other data", "data", hosts, NAMES)
    own = describe_tensors([*model.named_parameters(), *model.named_buffers()])
    refuse_differences([json.loads(known.get("fingerprint/model/0")), own], hosts=hosts, names=NAMES)
