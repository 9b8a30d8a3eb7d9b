"""What must be true of a run that faults happened to: everything is read from what it left, nothing is taken on trust.

Used by storm.py. A run that a fault ends is a fault of the product as much as one that ends with wrong params.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.faults.cases import ROLLS_BACK, Case
from tests.faults.one_run import Ran, RankNotes
from tests.faults.training import factor, loss_of, make_data, make_net, make_optimizer, run_folder
from uneven import TrainedState
from uneven.data.sample_order import permutation
from uneven.policy.axis import Axis
from uneven.results.checkpoint import read_checkpoint
from uneven.results.checkpoint_folders import find_checkpoints

NEAR = 1e-10
Parts = Sequence[Sequence[int]]  # (slot, first, samples)


@dataclass
class Outcome:
    """The verdict about one run; `faults` says in words what is wrong."""

    case: Case
    happened: int = 0
    ended: bool = False
    in_words: bool = False  # it ended early, as it may, and said why
    hung: bool = False
    lost: int = 0  # samples, by the log or by the params
    doubled: int = 0
    unequal: bool = False
    distance: float | None = None  # of an exact run from one process
    settled_s: list[float] = field(default_factory=list)  # per loss, from its detection
    again: int = 0  # samples trained again
    joined: int = 0  # ranks that came later
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    stacks: str = ""

    @property
    def is_right(self) -> bool:
        return (self.ended or self.in_words) and not self.faults

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "case": self.case.to_json(), "is_right": self.is_right}


def judge(ran: Ran) -> Outcome:
    case = ran.case
    found = Outcome(case, happened=len(ran.happened), seconds=ran.seconds, stacks=ran.stacks)
    found.joined = sum(notes.is_newcomer for notes in ran.notes)
    if ran.code is None:
        found.hung = True
        found.faults.append(f"hung: {_last_words(ran.said)}")
        return found
    if ran.left:
        found.faults.append(f"{ran.left} processes outlived their launcher")
    if ran.code != 0:
        found.in_words = _may_end_so(ran)
        if found.in_words:
            _check_folder(found, ran)
        else:
            found.faults.append(f"exit code {ran.code}: {_last_words(ran.said)}")
        return found
    try:
        state = TrainedState.load(run_folder(ran.folder))
        log = json.loads((run_folder(ran.folder) / "log.json").read_text())
    except Exception as error:
        found.faults.append(f"its result cannot be read: {error}")
        return found
    found.ended = state.finished
    if not state.finished:
        found.faults.append(f"it stopped after {state.slot} slots: {state.stopped}")
    _count_log(found, log)
    if case.model == "rows":
        _count_rows(found, state.params["rows"], log)
    _compare_replicas(found, ran)
    if case.is_exact and case.model in ("mlp", "norm"):
        found.distance = distance(case, state)
        if not found.distance <= NEAR:
            found.faults.append(f"{found.distance:.1e} from one process")
    _check_history(found, state)
    _check_folder(found, ran)
    _measure(found, ran)
    return found


def _may_end_so(ran: Ran) -> bool:
    """Whether this run could not go on, and says why: without copies of its shards, or without room for its result."""
    losses_s = [one.time for one in ran.happened if one.fault.may_be_loss]
    saved_s = [at for notes in ran.notes for at, letter, _ in notes.lines if letter == "v"]
    is_lost = bool(losses_s) and not (ROLLS_BACK and min(saved_s, default=math.inf) < min(losses_s))
    if any(one.fault.kind == "full" for one in ran.happened) and "no space left; choose another folder" in ran.said:
        return True
    return ran.code == 1 and ran.case.may_end and is_lost and "redundancy=1 keeps a copy" in ran.said


def _last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def axis_of(case: Case) -> Axis:
    return Axis(case.samples, case.slot_size, case.epochs)


def _count_log(found: Outcome, log: dict[str, Any]) -> None:
    """Every position of every slot once, by the log; counted here, where the run itself only says yes or no."""
    lost, doubled = count_parts(axis_of(found.case), log["ranks"])
    found.lost, found.doubled = lost, doubled
    if lost or doubled:
        found.faults.append(f"by the log {lost} samples are lost and {doubled} doubled")


def count_parts(axis: Axis, logs: Sequence[Parts]) -> tuple[int, int]:
    """Samples of the axis that no part holds, and how many times too often samples are held."""
    times: Counter[tuple[int, int]] = Counter()
    for log in logs:
        for slot, first, samples in log:
            times.update((slot, place) for place in range(first, first + samples))
    wanted = {(slot, place) for slot in range(axis.total) for place in _places(axis, slot)}
    lost = sum(times[one] == 0 for one in wanted)
    doubled = sum(many - 1 if one in wanted else many for one, many in times.items())
    return lost, doubled


def _places(axis: Axis, slot: int) -> range:
    return range(axis.slot(slot).first, axis.slot(slot).stop)


def _count_rows(found: Outcome, rows: Tensor, log: dict[str, Any]) -> None:
    """What the params say: the row of a sample is what its slot added to it, times the weight of its rank's average.

    Exact policies add the factor itself. In a local policy a row lies above 0 and is at most the factor, and all rows
    of a slot are the same, since one rank has trained it and whatever is averaged later is equal on all ranks.
    """
    case, order = found.case, permutation(found.case.seed, 0, found.case.samples)
    axis = axis_of(case)
    wrong, of_slot = 0, list[float]()
    for slot in range(axis.total):
        values = rows[torch.as_tensor(order[list(_places(axis, slot))])] / factor(slot)
        right = (values - 1.0).abs() <= NEAR if case.is_exact else (values > 0) & (values <= 1.0 + NEAR)
        right &= (values - values[0]).abs() <= NEAR
        wrong += int((~right).sum())
        found.lost += int((values == 0).sum())
        found.doubled += int((values > 1.0 + NEAR).sum())
        of_slot.append(float(values[0]))
    if wrong:
        found.faults.append(f"by the params {wrong} samples were not trained once, at the rate of their slot")
    elif found.joined:
        return  # who came later counts its rounds from then on
    elif not case.is_exact and (fault := compare_weights(of_slot, log["ranks"], log["rounds"])):
        found.faults.append(fault)


def compare_weights(values: Sequence[float], logs: Sequence[Parts], rounds: Sequence[Sequence[Any]]) -> str | None:
    """Whether the weights that the params show are those of the log; what is wrong with them, else None.

    A rank that handed in n of a round's W samples left n / W in each of their rows. So all ranks must show the same W
    for a round, of at least the samples that they handed in themselves; what is missing was handed in by ranks that are
    lost, and must be as much as the log says they trained. `rounds` are those of the ranks that are left, which come
    first in `logs`.
    """
    weights: dict[int, float] = {}
    handed_in: Counter[int] = Counter()
    for parts, entered in zip(logs, rounds, strict=False):
        ends = [place for _, place, *_ in entered]
        for number, (first, stop) in enumerate(zip([0, *ends], [*ends, len(parts)], strict=True)):
            samples = sum(part[2] for part in parts[first:stop])
            shown = {round(values[slot], 9) for slot, _, many in parts[first:stop] if many}
            if not samples:
                continue
            if len(shown) > 1:
                return f"by the params slots of round {number} have the weights {sorted(shown)}, by the log one"
            handed_in[number] += samples
            weight = samples / shown.pop()
            if abs(weights.setdefault(number, weight) / weight - 1.0) > 1e-6:
                both = f"{weight:.2f} samples on one rank, {weights[number]:.2f} on another"
                return f"by the params round {number} has {both}"
    missing = {number: weight - handed_in[number] for number, weight in weights.items()}
    if any(many < -1e-3 for many in missing.values()):
        return f"by the params rounds have fewer samples than their ranks handed in: {missing}"
    lost = sum(part[2] for parts in logs[len(rounds) :] for part in parts)
    if abs(sum(missing.values()) - lost) > 1e-3:
        return f"by the params lost ranks handed in {sum(missing.values()):.2f} samples, by the log {lost}"
    return None


def _compare_replicas(found: Outcome, ran: Ran) -> None:
    sums = {notes.pid: notes.checksum for notes in ran.notes if notes.pid not in ran.lost_pids}
    if len({one for one in sums.values() if one is not None}) > 1:
        found.unequal = True
        found.faults.append("replicas differ at the end")
    late = [pid for pid, one in sums.items() if one is None]
    if late or not sums:
        found.faults.append(f"{len(late)} of {len(sums)} ranks that nothing ended did not come to the end")


_references: dict[tuple[object, ...], dict[str, Tensor]] = {}


def distance(case: Case, state: TrainedState) -> float:
    """The largest difference of any param or buffer from a plain loop in one process."""
    # Every rank counts its own forwards of BatchNorm, and a redone one may count again: not a number of the model.
    values = {name: value for name, value in {**state.params, **state.buffers}.items() if value.is_floating_point()}
    return max(float((values[name] - wanted).abs().max()) for name, wanted in train_plainly(case).items())


def train_plainly(case: Case) -> dict[str, Tensor]:
    key = (case.model, case.optimizer, case.seed, case.samples, case.epochs, case.slot_size)
    if key in _references:
        return _references[key]
    data, model = make_data(case), make_net(case)
    optimizer = make_optimizer(case, model.parameters())
    axis = axis_of(case)
    for slot in range(axis.total):
        place = axis.slot(slot)
        order = permutation(case.seed, place.epoch, case.samples)
        optimizer.zero_grad()
        loss_of(case, model, data.take(torch.as_tensor(order[place.first : place.stop]), None)).backward()
        optimizer.step()
    _references[key] = {name: v.detach() for name, v in model.state_dict().items() if v.is_floating_point()}
    return _references[key]


def _check_history(found: Outcome, state: TrainedState) -> None:
    """One entry per epoch and per evaluation, in order, with the metrics where it was evaluated."""
    steps = [(entry["epoch"], bool(entry.get("is_inside_epoch")), entry["step"]) for entry in state.history]
    epochs = [epoch for epoch, is_inside, _ in steps if not is_inside]
    if epochs != list(range(1, found.case.epochs + 1)) or [step for *_, step in steps] != sorted(s for *_, s in steps):
        found.faults.append(f"the history has the epochs {epochs} of {found.case.epochs}, at {steps}")
    if len(set(steps)) < len(steps):
        found.faults.append(f"the history has an entry twice: {steps}")
    if found.case.eval_every and "loss" not in state.history[-1]:
        found.faults.append("the end was not evaluated")


def _check_folder(found: Outcome, ran: Ran) -> None:
    """Checkpoints are whole, and none is half-written."""
    out = run_folder(ran.folder)
    try:
        whole = [read_checkpoint(folder) for folder in find_checkpoints(out)] if ran.case.save_every else []
    except Exception as error:
        found.faults.append(f"a checkpoint cannot be read: {error}")
        return
    is_full = any(one.fault.kind == "full" for one in ran.happened)
    if ran.case.save_every and not whole and not is_full and not found.in_words:
        found.faults.append("no checkpoint was saved")
    half = [path.name for path in out.iterdir() if path.name.startswith(".") and path.name != ".uneven"]
    if half:
        found.faults.append(f"left in its folder: {half}")


def _measure(found: Outcome, ran: Ran) -> None:
    """Settle times, as the ranks' timelines have them, and the work that was done more than once."""
    case = ran.case
    if case.is_exact and case.model == "norm":
        # A rank without samples passes one through synchronised BatchNorm, which counts nothing.
        found.again = sum(notes.interrupted for notes in ran.notes)
    else:
        found.again = sum(notes.batches for notes in ran.notes) - case.samples * case.epochs
    events = json.loads((run_folder(ran.folder) / "timeline.json").read_text())["events"]
    generations = {event["number"] for event in events if event["kind"] == "generation"}
    found.settled_s = settle_times(ran.generations, ran.notes)
    if ran.losses and not generations:
        found.faults.append(f"{ran.losses} ranks were lost, and the timeline has no generation")
    if case.kind == "hold" and generations:
        found.faults.append("a healthy rank that held Python's lock was dropped")
    if case.may_end:
        return  # all since the last checkpoint
    most = allowed_again(ran, len(generations))
    if found.again > most:
        found.faults.append(f"{found.again} samples were trained again, more than {most}: one step or round per loss")


def allowed_again(ran: Ran, generations: int) -> int:
    """Samples: of every generation one global batch or, of a local policy, what who was lost had not handed in.

    A rank hands in a round while it trains on, and merges it later. So what it has handed in for sure was trained
    before the last round but one that it merged.
    """
    case = ran.case
    if case.is_exact:  # in synchronised BatchNorm a rank without samples passes one, which is none of the slot's
        return generations * (case.slot_size + (len(case.devices) if case.model == "norm" else 0))
    lost = sum(notes.since_round(2) for notes in ran.notes if notes.pid in ran.lost_pids)
    return lost + generations * case.slot_size * len(ran.notes)  # a step that a new generation interrupted


def settle_times(told: Mapping[int, float], ranks: Sequence[RankNotes]) -> list[float]:
    """Per generation, in seconds: from when the launcher had detected a loss until the last rank trained on.

    A generation in which another one was lost, before all had settled, is none.
    """
    settled: dict[int, float] = {}
    for one in ranks:
        for at, letter, numbers in one.lines:
            if letter == "g":
                settled[numbers[0]] = max(settled.get(numbers[0], 0.0), at)
    return [settled[number] - at for number, at in told.items() if number in settled]
