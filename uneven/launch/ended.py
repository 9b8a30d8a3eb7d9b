"""The end of a run: the summary that is printed, and what is written into its folder.

Called on every rank by launch/run.py, and for a loop of the user's own by api/fit.py; only the first rank writes.
"""

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from uneven.config import RunConfig
from uneven.errors import InputError, MachineError
from uneven.files import folder_error
from uneven.format import format_count
from uneven.hardware.interference import Interference
from uneven.launch.predicted import record_outcome
from uneven.launch.results_file import tell_result
from uneven.results.progress import Reporter
from uneven.results.state import TrainedState
from uneven.timeline.cold_start import cold_starts, describe_cold_starts
from uneven.timeline.export import save_timeline
from uneven.timeline.links import describe_links, machine_links
from uneven.timeline.page import write_page
from uneven.timeline.record import TRAINING
from uneven.timeline.timeline import Timeline
from uneven.timeline.verdict import NO_COMPARISON

PAGE = "timeline.html"
PAGES_SWITCH = "UNEVEN_PAGES"  # 0 in the environment: no pages, for programs of many short runs
NO_BOKEH = f"no {PAGE}: bokeh is not installed; pip install 'uneven[pages]'"


def save_results(
    state: TrainedState,
    config: RunConfig,
    reporter: Reporter,
    interference: Interference,
    is_lead: bool,
    *,
    plan: Mapping[str, Any] | None = None,
    has_page: bool = True,
) -> TrainedState:
    """Print the summary and write `out`, on the first rank."""
    assert state.timeline is not None, "a finished rank has a timeline"
    timeline = replace(state.timeline, run=replace(state.timeline.run, interference=interference))
    state = replace(state, timeline=timeline)
    reporter.close()
    reporter.say(summary_lines(state, timeline, interference))
    if is_lead:
        tell_result(state, timeline)
    if config.out is None or not is_lead:
        reporter.say(record_outcome(plan, state, timeline, None))
        return state
    try:
        _write(state, timeline, config.out, plan, reporter)
    except MachineError as error:
        # A full disk at the end: hours of training are in memory alone.
        last = "" if state.checkpoint is None else f", and {state.checkpoint} is the last checkpoint"
        unwritten = MachineError(f"{error}; `state` of this error holds what was trained{last}")
        unwritten.state = state
        raise unwritten from error
    reporter.say(leave_page(state, timeline, config, config.out) if has_page else [])
    reporter.say([f"state and timeline are in {config.out}"])
    return replace(state, folder=config.out)


def _write(
    state: TrainedState, timeline: Timeline, out: Path, plan: Mapping[str, Any] | None, reporter: Reporter
) -> None:
    """The result and what belongs to it; MachineError where it cannot be written."""
    state.save(out)
    try:
        reporter.say(record_outcome(plan, state, timeline, out))
        save_timeline(timeline, out)
    except OSError as error:
        raise folder_error(out, error) from error


def save_interrupted(state: TrainedState, reporter: Reporter) -> Path:
    """Save a stopped run; where `out` was not given below runs/, beside the checkpoint that its ranks took there.

    A current folder that cannot be written costs nothing that was trained: then it is a temporary folder.
    """
    folder = state.folder
    if folder is None:
        aside = Path("runs") / time.strftime("interrupted-%Y%m%d-%H%M%S")
        try:
            folder = state.save(aside if state.checkpoint is None else state.checkpoint.parent)
        except MachineError as error:
            reporter.say([str(error)])
            folder = state.save(tempfile.mkdtemp(prefix=f"uneven-{aside.name}-"))
    on = "" if state.checkpoint is None else f"; go on with resume={str(folder)!r}"
    reporter.say([f"stopped after {format_count(state.slot, 'step')}; the state is in {folder}{on}"])
    return folder


def summary_lines(state: TrainedState, timeline: Timeline, interference: Interference) -> list[str]:
    """How the run went: totals, and where each rank's time was spent. Nothing is derived from a disturbed speed."""
    training_s = timeline.training_s
    stopped = "stopped" if state.stopped is None else f"stopped early ({state.stopped})"
    done = "trained" if state.finished else f"{stopped}: trained"
    samples = state.samples_since_start
    speed = timeline.samples_per_s or 0.0
    resumed = f", {samples:,} of them since it was resumed," if samples < state.samples else ""
    lines = [f"{done} {state.samples:,} samples{resumed} in {training_s:.1f} s ({speed:,.0f} samples/s)"]
    if state.dropped:
        lost, steps = sum(samples for _, _, _, samples in state.dropped), len({slot for slot, *_ in state.dropped})
        lines.append(f"  {lost:,} samples were dropped: {steps} steps were not finite and were skipped")
    for lane, account in zip(timeline.lanes, timeline.accounts, strict=True):
        spent = "  ".join(f"{name} {100 * account.shares[name]:.1f} %" for name in TRAINING if account.shares[name])
        user_s = account.seconds["user"]
        outside_s = account.wall_s - account.training_s - user_s
        own_code = f", your own code {user_s:.1f} s" if user_s >= 0.05 else ""
        own = f"{100 * (lane.samples or 0) / max(1, samples):.0f} % of the samples; "
        share = own if len(timeline.lanes) > 1 else ""
        gone = "" if lane.ended is None else f" ({lane.ended.how} after {lane.end_ns / 1e9:.1f} s)"
        outside = f"not counted: setup, compile, evaluation {outside_s:.1f} s{own_code}"
        lines.append(f"  {timeline.name(lane)}{gone}: {share}{spent}; {outside}")
    lines += describe_cold_starts(cold_starts(timeline)) + describe_links(machine_links(timeline))
    alone: list[float] = next((event.fields["alone"] for event in timeline.events if event.kind == "shares"), [])
    if interference.is_disturbed:
        lines.append(f"  {interference.describe()} {NO_COMPARISON}")
    elif alone and speed:
        lines.append(
            f"  efficiency ~{speed / sum(alone):.2f} (of the sum of the devices alone), ~{speed / max(alone):.2f} "
            "times the fastest device; estimated from the warm-up, 'uneven bench efficiency' measures it"
        )
    return lines


def leave_page(state: TrainedState, timeline: Timeline, config: RunConfig, out: Path) -> list[str]:
    """Write the page of the run, made of its timeline: it never fails a run. Lines where it could not be written."""
    if os.environ.get(PAGES_SWITCH) == "0":
        return []
    if find_spec("bokeh") is None:
        return [NO_BOKEH]
    try:
        facts, title = facts_of(state, timeline, config), f"Run {out.resolve().name}"
        write_page(out / PAGE, timeline, state.history, title, facts)
    except (InputError, MachineError) as error:
        return [f"no {PAGE}: {error}"]
    except Exception as error:  # drawing is no part of training: whatever it meets, the results are saved
        return [f"no {PAGE}: {type(error).__name__}: {error}".partition("\n")[0]]
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
