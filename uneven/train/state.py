"""RunState: what changes while a run trains, but for tensors: how far it is, who trained what, what came before.

One per rank. It is written here alone: others call `commit` after a step, and the methods that follow. What all ranks
have the same is `shared()`: a checkpoint has it (train/saves.py), a newcomer and a survivor who is behind take it over
from the furthest rank (train/settler.py), a resumed run begins with it (train/saved_state.py). The rest is this
rank's `own()`.

Steps that were not finite are skipped, and their samples dropped: DroppedSteps knows which, and how many came in a row.
Every synchronizer hands each step's verdict to it, in order; the rule itself is [Note: steps that are not finite] in
step/finite.py.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from uneven.errors import InputError, NotFiniteError
from uneven.policy.axis import Axis, Part, Slot
from uneven.policy.events import Events
from uneven.policy.ledger import Ledger
from uneven.policy.packed import pack_log, pack_rounds
from uneven.policy.recorded import Round
from uneven.policy.stream_axis import StreamAxis
from uneven.results.state_tree import split_tree
from uneven.step.finite import Fault, Verdict
from uneven.timeline.record import Recorder

Log = dict[str, Any]  # of one rank: its parts, those that were dropped and, of a local policy, its rounds
Kept = tuple[dict[str, Any], dict[str, Any]]  # tensors that a callback kept, and their entry of the history


class BadStep(NamedTuple):
    """A step that was skipped."""

    part: Part
    fault: Fault


class DroppedSteps:
    """Life cycle: `add` after every step, which tells the bad ones among those that are known, as `settle` does.

    A captured step's verdict is known only when the device has done it; all others are known at once. `parts` holds
    (slot, first, samples) of what this rank dropped; `samples` counts those of all ranks, as far as this rank knows.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, int]] = []
        self.samples = 0
        self.in_a_row = 0  # bad steps since the last good one
        self.last: BadStep | None = None
        self._reported = 0  # of `samples`
        self._unknown: deque[tuple[Part, Verdict]] = deque()

    def restore(self, parts: list[tuple[int, int, int]], samples: int, in_a_row: int) -> None:
        """What was dropped before the checkpoint from which this run goes on."""
        self.parts = parts
        self.samples = samples
        self._reported = samples
        self.in_a_row = in_a_row

    def add(self, part: Part, verdict: Verdict, ahead: int) -> list[BadStep]:
        self._unknown.append((part, verdict))
        return self.settle(ahead)

    def settle(self, ahead: int = 0) -> list[BadStep]:
        """The bad steps among all but the last `ahead`; waits for the device where it must."""
        found = []
        while len(self._unknown) > ahead:
            part, verdict = self._unknown.popleft()
            fault = verdict()
            if fault is None:
                self.in_a_row = 0
                continue
            self.in_a_row += 1
            self.last = BadStep(part, fault)
            if part.samples:
                self.parts.append((part.slot.index, part.first, part.samples))
            found.append(self.last)
        return found

    @property
    def last_fault(self) -> Fault | None:
        """Why the last step was skipped; None where it was not."""
        return self.last.fault if self.last is not None and self.in_a_row else None

    @property
    def last_fields(self) -> dict[str, float]:
        """The last bad step as fields of a RoundReport."""
        return {} if self.last is None else {"bad_slot": self.last.part.slot.index, "bad_cause": self.last.fault.cause}

    @property
    def counted(self) -> tuple[int, int]:
        """The samples dropped by all ranks, and how many of them were reported."""
        return self.samples, self._reported

    def agree(self, samples: int, reported: int) -> None:
        """Take over what another rank has `counted`."""
        self.samples, self._reported = samples, reported

    def count(self, samples: int) -> None:
        """So many samples were dropped, by any rank."""
        self.samples += samples

    def take_unreported(self) -> int:
        """The samples dropped since the last call, for an epoch's entry in the history."""
        fresh, self._reported = self.samples - self._reported, self.samples
        return fresh

    def report_again(self, samples: int) -> None:
        """The entry that held them was undone."""
        self._reported -= samples


def describe_drop(slot: int | str, samples: int, fault: Fault) -> str:
    """The line to print for a step that was skipped."""
    return f"  slot {slot}: skipped, {samples} samples dropped: {fault}"


def too_many(slot: int, fault: Fault, max_bad_steps: int) -> NotFiniteError:
    """The error that ends the run."""
    steps = "a step was" if max_bad_steps == 1 else f"{max_bad_steps} steps in a row were"
    return NotFiniteError(
        f"slot {slot}, rank {fault.rank}: {fault}; {steps} not finite and skipped (max_bad_steps={max_bad_steps}): the "
        "learning rate may be too high, or a batch holds numbers that are not finite"
    )


def count_skipped(dropped: DroppedSteps, bad_steps: Sequence[BadStep], max_bad_steps: int) -> list[str]:
    """Count steps that all ranks skipped; returns lines to print, or raises where too many came in a row."""
    lines = []
    for part, fault in bad_steps:
        dropped.count(part.slot.samples)
        lines.append(describe_drop(part.slot.index, part.slot.samples, fault))
    if bad_steps and dropped.in_a_row >= max_bad_steps:
        part, fault = bad_steps[-1]
        raise too_many(part.slot.index, fault, max_bad_steps)
    return lines


class RunState:
    """Life cycle: made with the engine, `follow` when the axis is known; then `commit` after every step of this rank.

    The position on the axis counts slots: `trained` is the one after the last that is trained, by whichever rank.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.axis: Axis
        self.events: Events
        # How far the run is, and what this rank has trained of it.
        self.ledger = Ledger()  # what was trained before this run began, was resumed, or lost ranks of a local policy
        self.trained = self.samples = 0  # samples of this rank, in this process
        # (slot, first, samples) of every part, in order; those that were not finite are in `dropped`, too.
        self.log = pack_log()
        self.dropped = DroppedSteps()
        self.rounds = pack_rounds()  # of a local policy; the first entry is round 0
        self.skipped: list[tuple[int, int]] = []  # (epoch, samples) that the user's loop left out
        self.skipped_slots = 0  # the steps that those samples would have been
        # Its past, over all its segments.
        self.history: list[dict[str, Any]] = []
        self.saves: list[int] = []  # slots at which all ranks met for a checkpoint
        self.stop_rounds: list[int] = []  # rounds of a local policy after which a stop was saved
        self.segments: list[dict[str, Any]] = []  # where the run began and was resumed, on what
        self.train_seconds = 0.0  # of earlier segments
        self.kept: Kept | None = None
        self.monitored: str | None = None  # the metric that keep_best or a ReduceLROnPlateau follows, once evaluated
        # Ranks that are gone.
        self.earlier_logs: list[Log] = []  # of ranks of earlier segments
        self.generations: list[dict[str, Any]] = []  # those that are over, with what each rank trained
        # By member: what it had trained before the run was resumed. When the member is lost, it is an earlier log.
        self.resumed_logs: dict[str, Log] = {}
        self.lost_logs: list[Log] = []  # of members of `generations` that are gone
        self.user: dict[str, Any] = {}  # what the user's own loop registered

    def follow(self, axis: Axis, events: Events) -> None:
        """Count the slots of this axis; once more when an "auto" global_batch_size is known."""
        self.axis, self.events = axis, events

    # Training.

    def commit(self, part: Part, verdict: Verdict, position: int, ahead: int = 0) -> list[BadStep]:
        """A step of this rank is done: log its part; returns the steps now known to be bad, which are dropped.

        `position`: the number of slots that this rank has passed with it. A captured step's verdict is read when the
        run-ahead has waited for it anyway: that of the last `ahead` ones is not known yet.
        """
        self.log.append((part.slot.index, part.first, part.samples))
        self.trained = position
        self.samples += part.samples
        found = self.dropped.add(part, verdict, ahead)
        return self._note_dropped(found) if found else found

    def settle_steps(self, ahead: int = 0) -> list[BadStep]:
        """The bad steps among all but the last `ahead` ones; each is returned once."""
        return self._note_dropped(self.dropped.settle(ahead))

    def _note_dropped(self, found: list[BadStep]) -> list[BadStep]:
        for part, fault in found:
            self.samples -= part.samples
            fields = {"slot": part.slot.index, "samples": part.samples, "by": fault.rank, "cause": str(fault)}
            self._recorder.event("dropped", **fields)
        return found

    def commit_round(self, round_: Round) -> None:
        """A round of a local policy was merged."""
        self.rounds.append(round_)

    def reach_slot(self, slot: int) -> None:
        """All slots before this one are trained, by whichever rank."""
        self.trained = slot

    def skip_epoch(self, epoch: int, trained_samples: int | None = None) -> None:
        """The rest of an epoch is left out, of which all ranks together have trained so many samples.

        Where it is None this rank's position is that of all ranks; in a local policy each knows its own slots alone.
        """
        end = self.axis.epoch_end(epoch)
        first, stop = epoch * self.axis.samples, self.axis.samples_before(end)
        done = self.axis.samples_before(self.trained) - first if trained_samples is None else trained_samples
        if left := stop - first - done:
            self.skipped_slots += end - self.trained if trained_samples is None else -(-left // self.axis.slot_size)
            self.skipped.append((epoch, left))
            self._recorder.event("skip", epoch=epoch + 1, samples=left)
        self.trained = end

    def slot_at(self, position: int) -> int:
        """The slot that is trained when so many are: the same number, but for gaps that a stop has left."""
        return self.ledger.slot_at(position)

    @property
    def known_ledger(self) -> Ledger:
        """What is trained, as all ranks know it where they form a group."""
        return self.ledger.advanced_to(self.trained)

    def slots_left(self) -> Iterator[Slot]:
        """All slots that are not trained, in order; a stream's axis grows while they are trained."""
        end = max(self.trained, min(self.ledger.next, self.axis.total))
        gaps = (self.axis.slot(self.slot_at(position)) for position in range(self.trained, end))
        return chain(gaps, self.axis.slots(end))

    def samples_before(self, slot: int) -> int:
        """Samples that all ranks have trained before a slot; `slot` lies after everything that was left out."""
        return self.axis.samples_before(slot) - sum(samples for _, samples in self.skipped)

    # Where all ranks meet.

    def add_entry(self, entry: dict[str, Any]) -> None:
        """An entry of the history, with the samples that were dropped since the last one."""
        if dropped := self.dropped.take_unreported():
            entry["dropped"] = dropped  # samples of all ranks
        self.history.append(entry)

    def keep(self, tensors: dict[str, Any], entry: dict[str, Any]) -> None:
        """The run's result is to have these tensors."""
        self.kept = tensors, entry

    def follow_metric(self, name: str) -> None:
        self.monitored = name

    def note_save(self, slot: int) -> None:
        self.saves.append(slot)

    def know_resumed(self, logs: dict[str, Log]) -> None:
        """What each member had trained before the run was resumed."""
        self.resumed_logs = logs

    def note_stop_round(self) -> None:
        """A stop is saved after the last round."""
        self.stop_rounds.append(len(self.rounds) - 1)

    def mark(self) -> tuple[int, int, int]:
        """How much of the past there is, for `forget_after`."""
        return len(self.history), len(self.saves), len(self.stop_rounds)

    def forget_after(self, mark: tuple[int, int, int]) -> None:
        """An event was not reached by all ranks, or the run goes on after a stop."""
        entries, saves, stops = mark
        for entry in self.history[entries:]:
            self.dropped.report_again(entry.get("dropped", 0))
        del self.history[entries:]
        del self.saves[saves:]
        del self.stop_rounds[stops:]

    def register(self, name: str, value: Any, saved: Callable[[], Mapping[str, Any]]) -> Any:
        """Keep a value of the user's in checkpoints; returns it with what was `saved` of it, in a resumed run once."""
        if not isinstance(name, str) or not name:
            raise InputError(f"register({name!r}, ...): the name must be text, as in 'tokenizer'")
        known = saved() if name not in self.user else {}
        value = _load_user_value(value, known[name]) if name in known else value
        split_tree(_user_value(value), name)  # what cannot be kept is told now, not at the first checkpoint
        self.user[name] = value
        return value

    def user_values(self) -> dict[str, Any]:
        """What is kept of the user's registered objects."""
        return {name: _user_value(value) for name, value in self.user.items()}

    # Given to others, and taken from them.

    def shared(self) -> dict[str, Any]:
        """What all ranks have the same, as JSON."""
        samples, reported = self.dropped.counted
        return {
            "ledger": self.ledger.to_json(),
            "trained": self.trained,
            "epoch_sizes": list(self.axis.sizes) if isinstance(self.axis, StreamAxis) else [],
            "skipped": [list(one) for one in self.skipped],
            "skipped_slots": self.skipped_slots,
            "dropped_samples": samples,
            "dropped_reported": reported,
            "extra_saves": sorted(self.events.extra_saves),
            "extra_evaluations": sorted(self.events.extra_evaluations),
            "history": self.history,
            "saves": self.saves,
            "stop_rounds": self.stop_rounds,
            "monitored": self.monitored,
            "segments": self.segments,
            "earlier_logs": self.earlier_logs,
            "resumed_logs": self.resumed_logs,
        }

    def checkpoint(self, ledger: Ledger) -> dict[str, Any]:
        """The same for a checkpoint, which goes on from `ledger`, with whoever is there then."""
        gone = [*self.earlier_logs, *self.lost_logs]
        left_out = ("resumed_logs", "extra_saves", "extra_evaluations")
        found = {name: value for name, value in self.shared().items() if name not in left_out}
        return {**found, "ledger": ledger.to_json(), "trained": ledger.trained, "earlier_logs": gone}

    def own(self) -> dict[str, Any]:
        """What this rank alone knows, as JSON: for a checkpoint."""
        return {
            "log": list(self.log),
            "rounds": list(self.rounds),
            "dropped": list(self.dropped.parts),
            "dropped_in_a_row": self.dropped.in_a_row,
        }

    def show_end(self, slot: int, skipped: Sequence[tuple[int, int]]) -> None:
        """All is trained, by a run that was over before this process began."""
        self.trained, self.skipped = slot, list(skipped)

    def begin_segment(self, segment: dict[str, Any]) -> None:
        """The run begins, is resumed or goes on with other ranks here."""
        self.segments.append(segment)

    def resume(self, record: Mapping[str, Any], own: Mapping[str, Any] | None, earlier: list[Log]) -> None:
        """Go on from a checkpoint. `own` is what this very rank had saved, `earlier` what those had who are gone."""
        self._take_position(record)
        rows = own or {"log": (), "rounds": (), "dropped": (), "dropped_in_a_row": 0}
        self.log, self.rounds = pack_log(rows["log"]), pack_rounds(rows["rounds"])
        parts = [(slot, first, samples) for slot, first, samples in rows["dropped"]]
        self.dropped.restore(parts, record["dropped_samples"], rows["dropped_in_a_row"])
        self.history[:] = record["history"]
        is_cut = self.trained < self.axis.total and not self.axis.ends_epoch(self.trained)
        if (
            is_cut and self.history and self.history[-1]["step"] == self.trained
        ):  # a smaller max_steps had ended it here
            self.history[-1] = {**self.history[-1], "is_inside_epoch": True}
        self.saves, self.stop_rounds = list(record["saves"]), list(record["stop_rounds"])
        self.segments, self.monitored = list(record["segments"]), record.get("monitored")
        self.train_seconds = record["train_seconds"]
        self.earlier_logs = earlier  # on every rank: the first one, which reports them, may be lost

    def go_back(self, record: Mapping[str, Any], own: Mapping[str, Any] | None, all_logs: list[Log]) -> None:
        """Nothing that came after this checkpoint counts. The time that it took was spent all the same.

        `all_logs`: what every rank had trained. Whoever is lost next has nothing of its own before this.
        """
        seconds = self.train_seconds
        self.resume(record, own, all_logs)
        self.train_seconds, self.kept = seconds, None
        self.log = pack_log()
        self.dropped.restore([], self.dropped.samples, self.dropped.in_a_row)
        self.generations, self.lost_logs = [], []
        self.resumed_logs = {}
        self.events.take_requests((), ())

    def name_members(self, members: Sequence[str]) -> None:
        """Those who begin the run together."""
        self.segments[-1] |= {"members": list(members)}

    def take(self, shared: Mapping[str, Any]) -> None:
        """Go to where the furthest rank is; this rank's own log stays."""
        self._take_position(shared)
        self.dropped.agree(shared["dropped_samples"], shared["dropped_reported"])
        self.events.take_requests(shared["extra_saves"], shared["extra_evaluations"])

    def take_past(self, shared: Mapping[str, Any], kept: Kept | None) -> None:
        """Events that the furthest rank has been through are over here, too, with what it has kept there."""
        self.history[:] = shared["history"]
        self.saves, self.stop_rounds = shared["saves"], shared["stop_rounds"]
        self.monitored, self.kept = shared["monitored"], kept

    def enter_generation(
        self, shared: Mapping[str, Any], segment: dict[str, Any], lost: list[Log], ended: list[dict[str, Any]]
    ) -> None:
        """Go on with the members of this segment. `lost` is what those trained who were in an `ended` generation."""
        resumed, members = shared["resumed_logs"], segment["members"]
        gone = [log for member, log in resumed.items() if member not in members]
        self.earlier_logs = [*shared["earlier_logs"], *gone]
        self.resumed_logs = {member: log for member, log in resumed.items() if member in members}
        self.segments = [*shared["segments"], segment]
        self.lost_logs, self.generations = lost, ended

    def end_generations(self) -> None:
        """Of a local policy one rank is left, which has no rounds: what is known of the others must be kept here."""
        self.earlier_logs = [*self.earlier_logs, *self.lost_logs]
        self.lost_logs, self.generations = [], []

    def _take_position(self, record: Mapping[str, Any]) -> None:
        if isinstance(self.axis, StreamAxis):
            self.axis.learn_all(record["epoch_sizes"])
        self.ledger = Ledger.from_json(record["ledger"])
        self.trained = record.get("trained", self.ledger.trained)  # a checkpoint of an earlier version has the ledger
        self.skipped = [(epoch, samples) for epoch, samples in record["skipped"]]
        self.skipped_slots = record["skipped_slots"]


def _user_value(value: Any) -> Any:
    """What is kept of an object that the user registered."""
    state_dict = getattr(value, "state_dict", None)
    return state_dict() if callable(state_dict) else value


def _load_user_value(value: Any, saved: Any) -> Any:
    """Give a registered object its saved state, in place where it can be; returns the object to go on with."""
    load = getattr(value, "load_state_dict", None)
    if callable(load):
        load(saved)
        return value
    if isinstance(value, dict) and isinstance(saved, dict):
        value.clear()
        value.update(saved)
        return value
    if isinstance(value, list) and isinstance(saved, list):
        value[:] = saved
        return value
    if isinstance(value, Tensor) and isinstance(saved, Tensor):
        with torch.no_grad():
            value.copy_(saved)
        return value
    return saved
