"""Ranks of a local policy that are left go on together: who is furthest, what counts, where the next round starts.

`settle_local` is run in the group of a new generation by everybody in it, after `abandon`. Ranks tell each other how
far they have got (policy/lineage.py). The furthest one says what they agree upon. A rank that has the last round still
in flight gets its average from there and merges it late. Nobody loses what it trained since: it is in the next round.

[Note: all or nothing] Everything is received before anything is changed. So a rank stands as before the settlement or
after it, whenever another is lost: in the next generation those that had settled are the furthest, and no round can
have been committed meanwhile without the rest.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from uneven.average.verify import ODD_AVERAGE, judge
from uneven.comm.gather import broadcast_json, gather_checksums, gather_json
from uneven.comm.group import Group, SoloGroup
from uneven.policy.axis import Axis
from uneven.policy.lineage import Held, Lineage, encode, settled_ledger, trained_again
from uneven.policy.recorded import RecordedWindows, Round
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.windows import Windows
from uneven.train.elastic.settle import Settlement, seed_newcomer
from uneven.train.local_sgd import LocalSGD
from uneven.train.local_state import LocalState
from uneven.train.membership import Generation
from uneven.train.synchronizer import Merged


def begin_blank(local: LocalSGD) -> None:
    """Of a newcomer: it will settle with ranks that have trained, from nothing."""
    local.is_blank, local.average = True, local.new_average(SoloGroup(), None)
    local.average.close()


def abandon(local: LocalSGD) -> Merged | None:
    """Nothing that is on its way in the old group will arrive: merge the round in flight if its average is here.

    No collective, and none is waited for. Events that follow from that round stay in `local.epochs.pending`. May be
    called again.
    """
    local.claims.close()
    local.engine.run_ahead.drain()
    local.tally.dropped += sum(bad.samples for bad, _ in local.engine.state.settle_steps())
    return local.merge() if local.average.abandon() else None


def held_by(local: LocalSGD) -> Held:
    """What this rank has trained, after `abandon`."""
    if local.is_blank:
        return Held([])
    engine, schedule = local.engine, local.slot_schedule
    since = [part for part in engine.state.log if part[0] >= _passed(local)]
    given: list[int] = []
    if local.agreed is None and isinstance(schedule, SlotSchedule):
        given = [engine.state.slot_at(position) for position in schedule.slots]
    return Held(encode(since), tuple(slot for slot in given if slot < engine.axis.total))


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
    _apply(local, agreed, lineage, shared, buffers if is_behind else None)
    if group.world_size == 1:
        _hand_over(local)
    return agreed


def describe(agreed: LocalState, members: tuple[str, ...], settlement: Settlement, axis: Axis) -> dict[str, Any]:
    """What the run's log tells of a settlement: who merged the last round late, what is trained again."""
    newest, standings = settlement.furthest.progress, zip(members, settlement.standings, strict=True)
    return {
        "rolled": [member for member, one in standings if one.progress < newest and not one.is_newcomer],
        "again": agreed.again,
        "again_samples": sum(axis.slot(slot).samples for slot in agreed.again),
    }


def _hand_over(local: LocalSGD) -> None:
    """One rank is left alone: it needs no round for the events that are due, and keeps all losses in its meter."""
    epochs = local.epochs
    engine = local.engine
    axis = local.engine.axis
    position = engine.state.trained
    stop = max(epochs.epoch, axis.epochs_before(position))
    is_event = engine.events.evaluates(position) or engine.events.saves(position)
    is_inside = is_event and position > max(_passed(local), axis.epoch_end(stop - 1))
    own = engine.meter.pop_async()()
    epochs.losses = [epochs.losses[0] + own[0], epochs.losses[1] + own[1]]
    if stop > epochs.epoch or is_inside:
        until = position if is_inside else axis.epoch_end(stop - 1)
        epochs.pending += epochs.calls(epochs.epoch, stop, until, is_inside=is_inside)
        epochs.epoch = stop
    engine.meter.totals.copy_(torch.tensor(epochs.losses, dtype=torch.float64))


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


def _apply(
    local: LocalSGD, agreed: LocalState, lineage: Lineage, shared: Mapping[str, Any], buffers: torch.Tensor | None
) -> None:
    """See [Note: all or nothing]. `buffers` where this rank merges the last round late."""
    engine = local.engine
    tally = local.tally
    epochs = local.epochs
    was_blank = local.is_blank
    if was_blank:
        assert buffers is not None, "a newcomer is behind"
        local.average.roll_forward(buffers, is_unchanged=True)
        local.is_blank = False
    elif buffers is not None:
        assert tally.entered is not None, "a rank is behind by the round that it has in flight"
        local.before_change()
        local.average.roll_forward(buffers, is_unchanged=local.slot_schedule.staleness == 0)
        done = len(engine.state.log)
        engine.state.commit_round(Round(local.windows.due, tally.entered.parts, done, local.scale.value))
        tally.commit()
    tally.put_back()
    tally.lineage = lineage
    local.buffers.doubt_integers()
    local.agreed = agreed
    local.others_stop, local.is_stopped = agreed.is_stopping, False
    local.stream_end.passed()
    epochs.epoch, epochs.samples = agreed.epoch, agreed.epoch_samples
    epochs.losses, epochs.pending = list(agreed.losses), list(agreed.pending)
    engine.state.take({**shared, "ledger": agreed.ledger, "trained": agreed.ledger["trained"]})
    if was_blank:
        seed_newcomer(engine)
