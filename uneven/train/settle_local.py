"""Ranks of a local policy that are left go on together: who is furthest, what counts, where the next round starts.

`settle` is run in the group of a new generation by everybody in it, after `abandon`. Ranks tell each other how
far they have got (policy/lineage.py). The furthest one says what they agree upon. A rank that has the last round still
in flight gets its average from there and merges it late. Nobody loses what it trained since: it is in the next round.

[Note: all or nothing] Everything is received before anything is changed. So a rank stands as before the settlement or
after it, whenever another is lost: in the next generation those that had settled are the furthest, and no round can
have been committed meanwhile without the rest.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

import torch

from uneven.comm.gather import gather_bytes
from uneven.comm.group import Group
from uneven.policy.finish import Cost
from uneven.policy.lineage import Lineage, Standing, encode, furthest, settled_ledger, trained_again
from uneven.policy.recorded import Round
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.stream_axis import StreamAxis
from uneven.policy.windows import Windows
from uneven.train.epoch_ends import EventCall
from uneven.train.local_sgd import LocalSGD
from uneven.train.local_state import LocalState
from uneven.train.run_record import RunRecord


@dataclass(frozen=True)
class Settled:
    """What a settlement has found, the same on all ranks: for the log and the user."""

    source: int  # the rank that was furthest
    rolled: tuple[int, ...]  # ranks that merged the last round late
    again: tuple[int, ...]  # slots that ranks which are gone may have trained, and that are trained again
    costs: tuple[Cost, ...]  # of every rank, by its speed in the windows until now
    state: LocalState

    def keep_logs(self, run: RunRecord) -> None:
        """The run goes on with the logs of all that are gone, as far as they count; on every rank, for each may be
        the first one day.
        """
        known = [log for log in run.earlier_logs if "member" not in log]  # from before the run was resumed
        run.earlier_logs = [*known, *self.state.lost_logs]


def abandon(local: LocalSGD) -> None:
    """Nothing that is on its way in the old group will arrive: merge the round in flight if its average is here.

    No collective, and none is waited for. Events that follow from that round stay in `local.epochs.pending`. May be
    called again.
    """
    local.claims.close()
    local.engine.run_ahead.drain()
    local.tally.dropped += sum(bad.samples for bad, _ in local.engine.settle_steps())
    if local.average.abandon():
        local.merge(is_postponed=True)


def standing(local: LocalSGD, events: int = 0) -> Standing:
    """How far this rank has got, after `abandon`; `events` counts those that it has finished."""
    engine, tally = local.engine, local.tally
    since = [part for part in engine.log if part[0] >= _passed(local)]
    schedule = local.slot_schedule
    is_started = local.agreed is None and isinstance(schedule, SlotSchedule)
    given = tuple(engine.slot_at(position) for position in schedule.given) if is_started else ()
    return Standing(
        tally.lineage.generation,
        tally.lineage.merged,
        events,
        encode(since),
        len(engine.log) - tally.parts,
        tuple(slot for slot in given if slot < engine.axis.total),
    )


def settle(
    local: LocalSGD, group: Group, generation: int, members: tuple[str, ...], *, events: int = 0, rest: Any = None
) -> Settled:
    """In the new group, with `members` in its rank order. Changes `local` and its engine once all has arrived.

    `rest` is what the caller wants to know of the furthest, as JSON: it is in the state that is returned.

    GroupLostError where another rank is lost meanwhile: then nothing has changed, and the next generation settles.
    Next come RankInfo.rejoin and, with several ranks, `local.initialize(settled.costs)`; one that is left alone trains
    on with GradientSync, after `hand_over`.
    """
    told = gather_bytes(group, json.dumps(standing(local, events).to_json()).encode())
    standings = [Standing.from_json(json.loads(data)) for data in told]
    source = furthest(standings)
    own = _agree(local, standings, members, rest).to_bytes() if group.rank == source else b""
    agreed = LocalState.from_bytes(gather_bytes(group, own)[source])
    behind = tuple(rank for rank, one in enumerate(standings) if one.rounds < standings[source].rounds)
    buffers = _send_average(local, group, source) if behind else None
    _apply(local, agreed, Lineage(agreed.eras, generation, members), buffers if group.rank in behind else None)
    windows, slot_size = agreed.windows, local.engine.axis.slot_size
    assert windows is not None, "a replay does not settle"
    places = [place for place in agreed.places(members) if place is not None]
    costs = tuple(Cost(0.0, windows["_ms"][place] / slot_size) for place in places)
    return Settled(source, behind, tuple(agreed.again), costs, agreed)


def hand_over(local: LocalSGD) -> list[EventCall]:
    """After `settle`, for one rank that is left alone: returns the events that are due, whose round nobody needs.

    All losses are in the meter then, as GradientSync keeps them.
    """
    epochs, engine, axis = local.epochs, local.engine, local.engine.axis
    position = engine.trained
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
    return epochs.pending


def _passed(local: LocalSGD) -> int:
    """The last event that all ranks have passed."""
    return local.windows.passed if local.agreed is None else local.agreed.passed


def _own_state(local: LocalSGD) -> LocalState:
    """What this rank knows to be agreed upon."""
    engine, epochs, agreed, windows = local.engine, local.epochs, local.agreed, local.windows
    assert isinstance(windows, Windows), "a replay does not settle"
    lineage, axis = local.tally.lineage, engine.axis
    return LocalState(
        eras=lineage.eras,
        members=lineage.members if agreed is None else agreed.members,
        windows=windows.state_dict() if agreed is None else agreed.windows,
        passed=_passed(local),
        lr_scale=(local.scale.value, local.scale.is_known) if agreed is None else agreed.lr_scale,
        epoch=epochs.epoch,
        epoch_samples=epochs.samples,
        losses=epochs.losses,
        pending=epochs.pending,
        is_stopping=local.others_stop or local.is_stopped,
        saves=sorted(engine.events.extra_saves),
        evaluations=sorted(engine.events.extra_evaluations),
        dropped=engine.dropped.counted,
        epoch_sizes=axis.sizes if isinstance(axis, StreamAxis) else [],
    )


def _agree(local: LocalSGD, standings: list[Standing], members: tuple[str, ...], rest: Any) -> LocalState:
    """By the furthest rank: what counts."""
    state, records = _own_state(local), local.engine.rank_info.records
    assert records is not None, "ranks that go on after a loss have written down what they handed in"
    lost = [records.read(state.eras, member) for member in local.tally.lineage.gone(members)]
    ledger = settled_ledger(standings, [log["log"] for log in lost], state.passed)
    packed = [{**log, "log": encode(log["log"]), "dropped": encode(log["dropped"])} for log in lost]
    again = trained_again(ledger, standings)
    return replace(state, ledger=ledger.to_json(), lost=packed, again=again, rest=rest)


def _send_average(local: LocalSGD, group: Group, source: int) -> torch.Tensor:
    """The last average and its buffers, from the furthest to those that have it still in flight; returns the latter.

    A rank that has merged it takes part without a use for it.
    """
    transport, buffers = local.average.transport, local.buffers.agreed.clone()
    try:
        group.broadcast((transport.agreed if group.rank == source else transport.average).buffer, source).wait()
        if len(buffers):
            group.broadcast(buffers, source).wait()
    except BaseException:
        transport.renew()  # what was abandoned may still be written to
        raise
    return buffers


def _apply(local: LocalSGD, agreed: LocalState, lineage: Lineage, buffers: torch.Tensor | None) -> None:
    """See [Note: all or nothing]. `buffers` where this rank merges the last round late."""
    engine, tally, epochs = local.engine, local.tally, local.epochs
    if buffers is not None:
        assert tally.entered is not None, "a rank is behind by the round that it has in flight"
        local.before_change()
        local.average.roll_forward(buffers, is_unchanged=local.slot_schedule.staleness == 0)
        engine.record_round(Round(local.windows.due, tally.entered.parts, len(engine.log), local.scale.value))
        tally.commit()
    tally.put_back()
    tally.lineage = lineage
    local.buffers.doubt_integers()
    local.agreed = agreed
    local.others_stop, local.is_stopped = agreed.is_stopping, False
    local.stream_end.passed()
    epochs.epoch, epochs.samples = agreed.epoch, agreed.epoch_samples
    epochs.losses, epochs.pending = list(agreed.losses), list(agreed.pending)
    if isinstance(engine.axis, StreamAxis):
        for epoch, samples in enumerate(agreed.epoch_sizes):
            engine.axis.learn(epoch, samples)
    engine.events.take_requests(agreed.saves, agreed.evaluations)
    engine.dropped.agree(*agreed.dropped)
    engine.go_on_from(agreed.new_ledger, engine.log, engine.rounds)
