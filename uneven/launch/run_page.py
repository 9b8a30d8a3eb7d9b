"""timeline.html in the folder of a run: written at the end of every run that has `out`, where bokeh is installed.

Called by launch/run.py on the first rank. A page never fails a run: it is made of timeline.json, which is there.
"""

import os
from importlib.util import find_spec
from pathlib import Path

from uneven.config import RunConfig
from uneven.errors import InputError, MachineError
from uneven.results.state import TrainedState
from uneven.timeline.page import write_page
from uneven.timeline.timeline import Timeline

NAME = "timeline.html"
SWITCH = "UNEVEN_PAGES"  # 0 in the environment: no pages, for programs of many short runs
MISSING = f"no {NAME}: bokeh is not installed; pip install 'uneven[pages]'"


def leave_page(state: TrainedState, timeline: Timeline, config: RunConfig, out: Path) -> list[str]:
    """Write the page; lines for the user, where it could not be written."""
    if os.environ.get(SWITCH) == "0":
        return []
    if find_spec("bokeh") is None:
        return [MISSING]
    try:
        facts, title = facts_of(state, timeline, config), f"Run {out.resolve().name}"
        write_page(out / NAME, timeline, state.history, title, facts)
    except (InputError, MachineError) as error:
        return [f"no {NAME}: {error}"]
    except Exception as error:  # drawing is no part of training: whatever it meets, the results are saved
        return [f"no {NAME}: {type(error).__name__}: {error}".partition("\n")[0]]
    return []


def facts_of(state: TrainedState, timeline: Timeline, config: RunConfig) -> dict[str, str]:
    """One per card: who took part, and what was trained in this part of the run."""
    gone = {lane.rank: f" ({lane.ended.how})" for lane in timeline.lanes if lane.ended is not None}
    before = timeline.run.samples_before
    facts = {
        "devices": ", ".join(lane.device + gone.get(lane.rank, "") for lane in timeline.lanes),
        "policy": config.policy if len(timeline.lanes) > 1 else "one device",
        "samples": f"{state.samples:,}" + (f", {state.samples - before:,} since it was resumed" if before else ""),
        "training": f"{timeline.training_s:.1f} s" + (" since then" if before else ""),
    }
    if timeline.run.is_disturbed:
        facts["speed"] = "disturbed by other programs"
    if not timeline.is_one_machine:
        facts["machines"] = ", ".join(machine.host for machine in timeline.machines)
    return facts
