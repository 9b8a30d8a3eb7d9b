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
from uneven.comm.group import Group
from uneven.policy.axis import Axis
from uneven.policy.lineage import Held, Lineage, encode, settled_ledger, trained_again
from uneven.policy.recorded import RecordedWindows
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.stream_axis import StreamAxis
from uneven.policy.windows import Windows
from uneven.train.elastic.settle import Settlement
from uneven.train.local_sgd import LocalSGD
from uneven.train.local_state import LocalState
from uneven.train.membership import Generation


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
