"""Settling: whoever is left after a loss agrees on one state and goes on from it, in the group of a new generation.

Every member reports how far it is. The furthest one is the source: what it has applied has happened, and whoever is
behind takes it over. What nobody has applied is done again by those who are left. So a sample counts once in the
params that all of them hold, whatever the lost rank had in its memory.

First what both kinds of policy have in common, and the exact ones. Then the local ones: there the furthest rank says
what they agree upon, a rank that has the last round still in flight gets its average from there and merges it late,
and nobody loses what it trained since: it is in the next round.

[Note: all or nothing] Everything is received before anything is changed. So a rank stands as before the settlement or
after it, whenever another is lost: in the next generation those that had settled are the furthest, and no round can
have been committed meanwhile without the rest.

[Note: whole state in hand] Where params or optimizer state are sharded, those who are left put them together, and
divide them anew. The whole state (`engine.whole_state`) is on the host of every rank from the moment it was put
together until the first update in the new group begins: then all ranks have divided it. So where yet another rank is
lost, either all of those who are left have it, or none of them has begun to divide it, or all of them have. Where they
went back to a checkpoint, the state that they have read is in hand like that; where only some have, all do so again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from uneven.average.verify import ODD_AVERAGE, judge
from uneven.comm.gather import broadcast_json, gather_checksums, gather_json, gather_rows
from uneven.comm.group import Group
from uneven.config import SHARDED, RunConfig
from uneven.parallel.survivors import CanSurvive
from uneven.policy.axis import Axis, part_of
from uneven.policy.ledger import Ledger
from uneven.policy.lineage import Held, Lineage, encode, settled_ledger, trained_again
from uneven.policy.recorded import RecordedWindows
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.stream_axis import StreamAxis
from uneven.policy.windows import Windows
from uneven.results.state_tree import join_tree, split_tree
from uneven.step.finite import Fault
from uneven.step.loss import LossMeter
from uneven.step.several import OptimizerGroup, SeveralSteps
from uneven.train.engine import Engine
from uneven.train.gradient_sync import GradientSync
from uneven.train.local_sgd import LocalSGD
from uneven.train.local_state import LocalState
from uneven.train.rank_info import Generation
from uneven.train.saved_state import has_muon, lay_out
from uneven.train.state import Kept

NEWCOMER = -1  # the generation that a member has settled in which has trained in none


@dataclass(frozen=True)
class Standing:
    """How far a member is: the generation it has settled in, and the steps it has applied or rounds it has merged."""

    settled: int
    progress: int
    event: int  # all events up to this slot are over
    members: tuple[str, ...]  # of the generation it has settled in, in rank order
    is_local: bool = False  # progress counts the rounds of a local policy; a rank of one that is alone counts steps
    is_over: bool = False  # nothing is left to train, and all that follows it is done
    event_loss: float | None = None  # of the event that it has begun and not finished
    fault: Fault | None = None  # why its last step was skipped, if it was
    skips: int = 0  # epochs that a loop of the user's own left out in part
    averages: int = 0  # of buffers, that it has
    updates: int = 0  # that it has applied of the step after those, where several optimizers step one after the other

    @property
    def key(self) -> tuple[int, ...]:
        return self.settled, *self.position, self.event, self.averages

    @property
    def position(self) -> tuple[int, int]:
        return self.progress, self.updates

    @property
    def is_newcomer(self) -> bool:
        return self.settled == NEWCOMER


@dataclass(frozen=True)
class Settlement:
    """Every member's standing, in the order of the new ranks; the same on all of them."""

    standings: tuple[Standing, ...]
    source: int  # the furthest one: the lowest rank of those

    @property
    def furthest(self) -> Standing:
        return self.standings[self.source]

    @property
    def is_uneven(self) -> bool:
        """Whether somebody who has trained is behind the source, and takes its state over."""
        return any(one.position != self.furthest.position for one in self.standings if not one.is_newcomer)

    @property
    def has_newcomers(self) -> bool:
        return any(one.is_newcomer for one in self.standings)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train: whoever joins this late takes part in the result alone."""
        return all(one.is_over or one.is_newcomer for one in self.standings)

    @property
    def event_loss(self) -> float | None:
        """The loss of the event that is reached again, where one of them had it already.

        None where the furthest one has finished the event: else it would be that of the next one, too.
        """
        known = (one.event_loss for one in self.standings if one.key == self.furthest.key)
        return next((loss for loss in known if loss is not None), None)

    @property
    def has_taken_losses(self) -> bool:
        """Whether the event's loss is a mean of the meters, which are empty then; a checkpoint alone has none."""
        return self.event_loss is not None and not math.isnan(self.event_loss)


def compare(group: Group, own: Standing) -> Settlement:
    """Exchange standings and find the source; a collective."""
    rows = gather_json(group, asdict(own))
    standings = tuple(
        Standing(**{**row, "members": tuple(row["members"]), "fault": row["fault"] and Fault.from_json(row["fault"])})
        for row in rows
    )
    return Settlement(standings, max(range(len(standings)), key=lambda rank: (standings[rank].key, -rank)))


def why_not(engine: Engine) -> str | None:
    """Why the loss of a rank ends this run, whatever on_fault says; None where the others can go on."""
    config = engine.config
    if config.is_model_parallel:
        return f"strategy={config.strategy!r} has parts of the model on every rank"
    if needs_checkpoint(engine) and engine.is_own_loop:
        fix = "" if has_muon(engine) else "; redundancy=1 keeps a copy of each shard"
        return f"a loop of your own cannot go back to a checkpoint{fix}"
    if needs_checkpoint(engine) and config.save_every is None and config.resume is None:
        return no_checkpoint(engine)
    if config.backend == "nccl":
        return "backend='nccl' cannot give up a sum that is under way"
    if config.compile == "graph" and engine.device.type == "cuda" and not config.is_local:
        return "compile='graph' has captured the steps of this group"
    if config.replay is not None:
        return "it is a replay"
    return None


def needs_checkpoint(engine: Engine) -> bool:
    """Whether the loss of a rank means going back to a checkpoint: there are shards, and nobody has a copy of them."""
    return has_muon(engine) or (engine.config.strategy in SHARDED and not engine.config.redundancy)


def no_checkpoint(engine: Engine) -> str:
    """Why a loss ends the run, where a checkpoint is needed and there is none."""
    what = "MuonAdamW" if has_muon(engine) else f"strategy={engine.config.strategy!r}"
    copy = "" if has_muon(engine) else "redundancy=1 keeps a copy of each part, "
    return (
        f"{what} has a part of the state on every rank, and there is no checkpoint to go back to; {copy}save_every=... "
        "saves checkpoints"
    )


def why_not_joined(engine: Engine) -> str | None:
    """Why nobody may join this run, though it can go on without a rank; None where others may."""
    config = engine.config
    if isinstance(engine.step, SeveralSteps):
        return "it has several optimizers"
    if config.strategy in SHARDED or has_muon(engine):
        what = "MuonAdamW" if has_muon(engine) else f"strategy={config.strategy!r}"
        return f"{what} has its state in shards, of which a newcomer has none"
    for name in ("shares", "memory_shares", "memory_cap"):
        if isinstance(getattr(config, name), tuple):
            return f"{name} has one entry for each rank of the start"
    return None


def scaler_state(engine: Engine) -> dict[str, Any] | None:
    """For `take_scaler`; ranks of a local policy scale their own losses."""
    scaler = engine.step.precision.scaler
    return scaler.state_dict() if scaler.is_enabled() and not engine.config.is_local else None


def take_scaler(engine: Engine, state: Mapping[str, Any] | None) -> None:
    """Go on with the source's loss scaler, if there is one: gradients are summed over ranks as they are scaled.

    A newcomer's has the first scale; that of a rank which takes a step over has not seen whether it overflowed.
    """
    if state is None:
        return
    scaler = engine.step.precision.scaler
    scaler.scale(torch.ones((), device=engine.device))  # makes its tensors, which a newcomer's lacks
    # A sharded step may be lost between its unscaling and its end: only `update` makes the scaler forget that, and
    # `load_state_dict` sets the rest.
    scaler.update(float(state["scale"]))
    scaler.load_state_dict(dict(state))


def config_of(config: RunConfig, ranks: Sequence[int]) -> RunConfig:
    """Settings that have one entry per rank, for those of the ranks that are left, in their new order."""

    def pick(values: Any) -> Any:
        return tuple(values[rank] for rank in ranks) if isinstance(values, tuple) else values

    given = {"shares": config.shares, "memory_shares": config.memory_shares, "memory_cap": config.memory_cap}
    return replace(config, **{name: pick(values) for name, values in given.items()})


def share_tensors(group: Group, source: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The source's tensors on every rank, in host memory; a collective. What the others pass is not used."""
    specs = {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}
    agreed = broadcast_json(group, specs, source)
    if group.rank == source:
        found = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    else:
        found = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in agreed.items()}
    for work in [group.broadcast(tensor.view(-1), source) for tensor in found.values() if tensor.numel()]:
        work.wait()
    return found


def share_kept(group: Group, settlement: Settlement, kept: Kept | None) -> Kept | None:
    """What callbacks have kept on the source, on every rank; a collective. What the others pass is not used.

    Call it where the source has kept something. Nothing is sent where all have been through the same events.
    """
    if all(one.event == settlement.furthest.event for one in settlement.standings):
        return kept
    told: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if group.rank == settlement.source:
        assert kept is not None, "see above"
        fields, entry = kept
        skeleton, tensors = split_tree(fields, "kept")
        told = {"fields": skeleton, "entry": entry}
    agreed = broadcast_json(group, told, settlement.source)
    found = share_tensors(group, settlement.source, tensors)
    return join_tree(agreed["fields"], found), agreed["entry"]


def take_replica(engine: Engine, group: Group, source: int, is_behind: bool, *, with_buffers: bool = False) -> None:
    """Params and optimizer state of the source, on ranks that are behind it; a collective.

    Buffers only for newcomers: those of the others are their own until ranks average them.
    """
    optimizer = engine.optimizer.state_dict()
    skeleton, state = split_tree(optimizer["state"], "optimizer")
    agreed = broadcast_json(group, {"optimizer": skeleton}, source)
    params: dict[str, Tensor] = {f"params.{name}": param for name, param in engine.model.named_parameters()}
    if with_buffers:
        params.update({f"buffers.{name}": buffer for name, buffer in engine.model.named_buffers()})
    found = share_tensors(group, source, {**params, **state})
    if not is_behind:
        return
    with torch.no_grad():
        for name, tensor in params.items():
            tensor.copy_(found[name])
    load_optimizer_state(engine.optimizer, join_tree(agreed["optimizer"], found))


def load_optimizer_state(optimizer: Optimizer, state: dict[int, Any]) -> None:
    """Load what the optimizer keeps for its params; its groups stay, and so do the addresses of tensors that fit.

    A newcomer has captured its step by then: its graph would go on with the tensors that `Optimizer.load_state_dict`
    replaces, learning rates among them.
    """
    if isinstance(optimizer, OptimizerGroup):
        for member, own in optimizer.divide(state):
            load_optimizer_state(member, own)
        return
    groups, before = optimizer.param_groups, {param: dict(values) for param, values in optimizer.state.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": lay_out(state, optimizer)})
    optimizer.param_groups = groups
    with torch.no_grad():
        for param, values in before.items():
            taken = optimizer.state.get(param, {})
            for name, own in values.items():
                new = taken.get(name)
                if isinstance(own, Tensor) and isinstance(new, Tensor) and own.shape == new.shape:
                    taken[name] = own.copy_(new)


def settle_exact(
    engine: Engine,
    before: GradientSync | None,
    own: Standing,
    settlement: Settlement,
    members: Sequence[str],
    scaler: Mapping[str, Any] | None,
) -> bool:
    """Bring this rank to the furthest one's step, with its loss `scaler`; a collective. `before` is the synchronizer of
    the lost group, if there was one, and `members` are those of the new one. False on all where that is not possible,
    because shards are lost for good: nothing has changed then. `RunState.take` follows.

    A step happened if any of those who are left has applied it: its gradients held all ranks' samples. A rank that had
    its own part in the sum counts it as trained, or as dropped where the step was skipped. Else the slot is trained
    again, from the same buffers; it draws new random numbers, since ranks train other samples of it now. Of several
    optimizers one update is enough, see `end_between_updates`, which comes before this.
    """
    group, source = engine.rank_info.group, settlement.source
    is_behind = own.position < settlement.furthest.position and not own.is_newcomer
    if engine.strategy is not None:
        if not settle_shards(engine, group, own.members, members):
            return False
    elif settlement.is_uneven:
        take_replica(engine, group, source, is_behind)
    # Nothing above has changed what this rank would report if yet another one were lost meanwhile.
    take_scaler(engine, scaler)
    if before is not None:
        is_left_out = is_behind and own.skips < settlement.furthest.skips
        before.end_interrupted(was_applied=is_behind and not is_left_out, fault=settlement.furthest.fault)
    if settlement.has_newcomers:  # now that buffers are those of the last step that counts
        take_replica(engine, group, source, own.is_newcomer, with_buffers=True)
    return True


def end_between_updates(before: GradientSync, own: Standing, settlement: Settlement) -> None:
    """[Note: lost between updates] in step/several.py: who is as far as the furthest one ends the step here.

    Before anybody tells of the run: by then the step is behind the source.
    """
    if own.updates and own.position == settlement.furthest.position:
        before.end_interrupted(was_applied=True, fault=own.fault)


def lost_logs(generations: Sequence[Mapping[str, Any]], members: Sequence[str], axis: Axis) -> list[dict[str, Any]]:
    """What those have trained who were in earlier generations and are none of these members, one log each."""
    logs: dict[str, dict[str, Any]] = {}
    for generation in generations:
        for rank, member in enumerate(generation["members"]):
            if member not in members:
                found = log_of(generation, rank, axis)
                known = logs.setdefault(member, {"member": member, "log": [], "dropped": []})
                known["log"] += found["log"]
                known["dropped"] += found["dropped"]
    return list(logs.values())


def log_of(record: Mapping[str, Any], rank: int, axis: Axis) -> dict[str, list[tuple[int, int, int]]]:
    """All parts of a rank in a generation, and those that were dropped."""
    ledger = Ledger.from_json(record["ledger"])
    dropped = set(record["dropped"])
    log = []
    ends = [position for position, _ in record["plan"][1:]] + [record["end"]]
    for (start, shares), end in zip(record["plan"], ends, strict=True):
        for position in range(start, end):
            if any(first <= position < stop for first, stop in record["left_out"]):
                continue
            part = part_of(axis.slot(ledger.slot_at(position)), shares, rank, 1)
            if part.samples:
                log.append((part.slot.index, part.first, part.samples))
    return {"log": log, "dropped": [entry for entry in log if entry[0] in dropped]}


# The losses of a lost rank count in its epoch. With exact policies ranks tell each other in every step what their
# meters hold (`LossMeter.known`); in the local ones the losses are in the sums of the rounds. `known` is that of the
# last step that counts, on every rank that has applied it: so the furthest one's is right for all. Whoever is left
# takes its own entry from there, and the furthest one those of the lost as well.
Losses = list[tuple[float, float]]  # sum and count, of every rank's meter


def exchange_losses(meter: LossMeter, group: Group) -> None:
    """Before the first step, when a checkpoint may have left something in the meters; a collective."""
    meter.learn([(loss_sum, count) for loss_sum, count in gather_rows(group, meter.totals.tolist())])


def settled_losses(meter: LossMeter, before: Sequence[str], own: str, members: Sequence[str]) -> Losses:
    """By the furthest one, `own`: every member's, where `before` were those of the lost group. Newcomers have none."""
    known = dict(zip(before, meter.known, strict=False))  # a rank that was alone is told nothing
    known[own] = tuple(meter.totals.tolist())
    lost = [losses for member, losses in known.items() if member not in members]
    known[own] = (sum(each for each, _ in (known[own], *lost)), sum(each for _, each in (known[own], *lost)))
    return [known.get(member, (0.0, 0.0)) for member in members]


def take_losses(meter: LossMeter, settled: Losses, rank: int, *, are_taken: bool) -> None:
    """Go on with them. `are_taken`: they are in an epoch's mean already, though the furthest one may not know it."""
    meter.learn([(0.0, 0.0)] * len(settled) if are_taken else [(loss_sum, count) for loss_sum, count in settled])
    meter.restore(meter.known[rank])


def settle_buffers(
    engine: Engine, before: GradientSync | LocalSGD | None, own: Standing, settlement: Settlement
) -> None:
    """Where the ranks were about to average their buffers: it happened if any who is left has it; a collective.

    At evaluations, checkpoints and the end of a run all ranks average them (of a local policy only integer buffers: the
    others are in its rounds). A rank that could not get the result takes it over from the furthest one, as params of a
    step that it missed. So the samples of a lost rank stay in the average that it was in. `before` was this rank's
    synchronizer; a newcomer, which has none, takes nothing here.
    """
    furthest = settlement.furthest
    if all(one.is_newcomer or one.averages == furthest.averages for one in settlement.standings):
        return
    buffers, sent = None if before is None else before.buffers, dict[str, Tensor]()
    if buffers is not None:
        sent = {f"integers.{place}": tensor for place, tensor in enumerate(buffers.agreed_integers)}
        sent |= {} if furthest.is_local else {"floats": buffers.agreed}
    found = share_tensors(engine.rank_info.group, settlement.source, sent)
    if buffers is None or before is None or own.averages == furthest.averages:
        return
    before.before_change()
    buffers.take_integers([found[f"integers.{place}"] for place in range(len(buffers.agreed_integers))])
    if isinstance(before, GradientSync):
        before.take_buffers(found["floats"])
    buffers.go_on_from(furthest.averages)


def settle_shards(engine: Engine, group: Group, before: Sequence[str], members: Sequence[str]) -> bool:
    """Put the whole state together, of the furthest step; a collective. False on all where a shard is lost.

    `before` are the members whose ranks hold the shards, `members` those who are left, each in rank order.
    """
    strategy = engine.strategy
    assert isinstance(strategy, CanSurvive), "see why_not in settle.py"
    rows = gather_rows(group, [float(engine.whole_state is not None), float(engine.rolled_back)])
    rolled_back = {which for _, which in rows if which}
    whole = engine.whole_state
    if not all(has for has, _ in rows):  # [Note: whole state in hand]
        survived = None
        if not rolled_back:
            survived = strategy.surviving_state(group, [list(before).index(member) for member in members])
        if survived is None:
            return False
        whole = survived.state
    elif len(rolled_back) > 1:
        return False
    assert whole is not None, "it was just put together, or everybody has it"
    engine.keep_whole(whole)
    return True


def held_by(local: LocalSGD) -> Held:
    """What this rank has trained, after `abandon`."""
    if local.is_blank:
        return Held([])
    engine, schedule = local.engine, local.slot_schedule
    since = [part for part in engine.state.log if part[0] >= _passed(local)]
    given: list[int] = []
    if local.agreed is None and isinstance(schedule, SlotSchedule):
        given = [engine.state.slot_at(position) for position in schedule.slots]
    end = (local.epoch, local.stream_end.samples)
    return Held(encode(since), tuple(slot for slot in given if slot < engine.axis.total), end)


def settle_local(
    local: LocalSGD,
    group: Group,
    generation: Generation,
    settlement: Settlement,
    shared: Mapping[str, Any],
) -> LocalState:
    """In the new group of `generation`, whose furthest rank has told what is `shared`. Changes `local` and its engine
    once all has arrived.

    Those who have left on purpose have trained nothing that is not in an average.

    GroupLostError where another rank is lost meanwhile: then nothing has changed, and the next generation settles.
    Next comes a LocalSGD that goes on after `local`. One rank that is left alone trains on with GradientSync, and
    reaches the events in `local.epochs.pending` before.
    """
    source, furthest = settlement.source, settlement.furthest
    held = [Held.from_json(data) for data in gather_json(group, held_by(local).to_json())]
    own = _agree(local, held, generation).to_json() if group.rank == source else None
    agreed = LocalState.from_json(broadcast_json(group, own, source))
    is_behind = settlement.standings[group.rank].progress < furthest.progress
    is_sent = settlement.is_uneven or settlement.has_newcomers
    buffers = _send_average(local, group, source, is_behind) if is_sent else None
    lineage = Lineage(agreed.eras, local.engine.rank_info.generation, generation.members)
    was_blank = local.is_blank
    local.take(agreed, lineage, buffers if is_behind else None)
    local.engine.state.take({**shared, "ledger": agreed.ledger, "trained": agreed.ledger["trained"]})
    if isinstance(axis := local.engine.axis, StreamAxis):  # who has trained the last slot has been told of the end
        for epoch, samples in (one.end for one in held if one.end[1]):
            axis.learn(epoch, samples)
    if was_blank:
        local.engine.seed_as_newcomer()
    if group.world_size == 1:
        local.hand_over()
    return agreed


def describe(agreed: LocalState, members: tuple[str, ...], settlement: Settlement, axis: Axis) -> dict[str, Any]:
    """What the run's log tells of a settlement: who merged the last round late, what is trained again."""
    newest, standings = settlement.furthest.progress, zip(members, settlement.standings, strict=True)
    return {
        "rolled": [member for member, one in standings if one.progress < newest and not one.is_newcomer],
        "again": agreed.again,
        "again_samples": sum(axis.slot(slot).samples for slot in agreed.again),
    }


def _passed(local: LocalSGD) -> int:
    """The last event that all ranks have passed."""
    return local.windows.last_event if local.agreed is None else local.agreed.passed


def _own_state(local: LocalSGD) -> LocalState:
    """What this rank knows to be agreed upon."""
    epochs = local.epochs
    agreed = local.agreed
    windows = local.windows
    lineage = local.tally.lineage
    return LocalState(
        eras=lineage.eras,
        members=lineage.members if agreed is None else agreed.members,
        windows=_windows_state(windows) if agreed is None else agreed.windows,
        passed=_passed(local),
        lr_scale=(local.scale.value, local.scale.is_known) if agreed is None else agreed.lr_scale,
        epoch=epochs.epoch,
        epoch_samples=epochs.samples,
        losses=epochs.losses,
        pending=epochs.pending,
        is_stopping=local.others_stop or local.is_stopped,
    )


def _windows_state(windows: Windows | RecordedWindows) -> dict[str, Any] | None:
    """A replay has no estimates to go on with."""
    return windows.state_dict() if isinstance(windows, Windows) else None


def _agree(local: LocalSGD, held: list[Held], generation: Generation) -> LocalState:
    """By the furthest rank: what counts."""
    members = generation.members
    state, records = _own_state(local), local.engine.rank_info.records
    assert records is not None, "ranks that go on after a loss have written down what they handed in"
    lost = [records.read(state.eras, member) for member in local.tally.lineage.gone(members)]
    ledger = settled_ledger(held, [log["log"] for log in lost], state.passed)
    packed = [{**log, "log": encode(log["log"]), "dropped": encode(log["dropped"])} for log in lost]
    is_any_lost = not {*local.tally.lineage.members} <= {*members, *generation.left}
    again = trained_again(ledger, held) if is_any_lost else []
    return replace(state, ledger=ledger.to_json(), lost=packed, again=again)


def _send_average(local: LocalSGD, group: Group, source: int, is_behind: bool) -> torch.Tensor:
    """The last average and its buffers, from the furthest to those that have it still in flight; returns the latter.

    A rank that has merged it takes part without a use for it. With `verify` all compare what they have then.
    """
    transport, buffers = local.average.transport, local.buffers.agreed.clone()
    try:
        group.broadcast((transport.agreed if group.rank == source else transport.average).buffer, source).wait()
        if len(buffers):
            group.broadcast(buffers, source).wait()
        if local.engine.config.verify:
            average = transport.average if is_behind else transport.agreed
            judge(gather_checksums(group, [average.buffer]), group.rank, ODD_AVERAGE, can_redo=True)
    except BaseException:
        transport.renew()  # what was abandoned may still be written to
        raise
    return buffers
