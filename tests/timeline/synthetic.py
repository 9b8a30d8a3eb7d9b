"""Synthetic timelines of any size, with everything that a page can show."""

import random
from dataclasses import replace
from typing import Any

from uneven.timeline.clock import ClockReading, Machine
from uneven.timeline.record import Event, account_of
from uneven.timeline.sample import Sample
from uneven.timeline.timeline import Lane, Timeline

MS = 1_000_000


def lanes_of(*lanes: list[tuple[str, int]]) -> Timeline:
    """A timeline of lanes that are given as (state, length) pairs and start at 0."""
    made = []
    for rank, pieces in enumerate(lanes):
        spans, at = [], 0
        for state, length in pieces:
            spans.append((state, at, at + length))
            at += length
        made.append(Lane(rank, f"cpu@{rank}", spans))
    return Timeline(made, [account_of(lane.rank, lane.spans) for lane in made], [], [])


def make_run(ranks: int = 2, steps: int = 120, epochs: int = 3, seed: int = 0) -> Timeline:
    """Setup, then steps of data, compute and wait, with some rounds and an evaluation after every epoch."""
    rng = random.Random(seed)
    lanes = []
    for rank in range(ranks):
        pieces = [("setup", 40 * MS + rank * MS), ("compile", 30 * MS), ("communication", 5 * MS)]
        for step in range(steps):
            pieces += [("data", rng.randrange(50_000, 200_000)), ("compute", rng.randrange(4 * MS, 9 * MS))]
            pieces += [("wait", rng.randrange(10_000, 3 * MS)), ("communication", rng.randrange(10_000, 900_000))]
            if (step + 1) * epochs % steps < epochs:
                pieces += [("evaluation", 20 * MS), ("other", 300_000)]
        lanes.append(pieces)
    timeline = lanes_of(*lanes)
    end = min(lane.spans[-1][2] for lane in timeline.lanes)
    events = [event for lane in timeline.lanes for event in _events(lane.rank, ranks, end, epochs)]
    samples = [
        Sample(t, 50.0 + t % 50, 90.0 + t % 70, 10**9, 10**8, ((0, float(t % 100), 10**9),))
        for t in range(100 * MS, end, 100 * MS)
    ]
    lanes_ = [replace(lane, samples=steps * 32) for lane in timeline.lanes]
    return Timeline(lanes_, timeline.accounts, sorted(events, key=lambda event: event.t_ns), samples)


def make_machines(steps: int = 120) -> Timeline:
    """A run on three machines with 1 + 2 + 1 devices, whose clocks were compared at its start and its end."""
    run = make_run(ranks=4, steps=steps)
    places = (0, 1, 1, 2)
    end = run.lanes[0].spans[-1][2]
    machines = (
        Machine(0, "pc-anna"),
        Machine(
            1, "pc-bert", (ClockReading(-60_000 * MS, 60_000 * MS, 180_000), ClockReading(end, 60_001 * MS, 210_000))
        ),
        Machine(2, "laptop", (ClockReading(0, -3_600_000 * MS, 2 * MS), ClockReading(end, -3_600_000 * MS - 40, MS))),
    )
    lanes = [replace(lane, machine=places[lane.rank]) for lane in run.lanes]
    events = []
    for event in run.events:
        if event.kind == "round":  # the laptop is on a slow link
            slow = {"met_ms_ago": 11.0 + event.fields["round"], "left_ms_ago": 20.0} if event.rank == 3 else {}
            event = replace(event, fields=event.fields | slow)
        events.append(event)
    samples = [replace(sample, machine=machine) for sample in run.samples for machine in range(3)]
    return Timeline(lanes, run.accounts, events, samples, machines)


def _events(rank: int, ranks: int, end: int, epochs: int) -> list[Event]:
    shares = [10 * (ranks - place) for place in range(ranks)]
    events = [Event(end // 20, rank, "shares", {"slot": 0, "shares": shares, "alone": []})]
    events.append(Event(end // 20, rank, "lr_scale", {"scale": 1.5}))
    for number in range(1, 9):
        t = end // 20 + number * end // 10 - rank * 1000
        fields: dict[str, Any] = {"round": number, "due": 30 * number, "steps_late": 1, "delay": 0.5, "wait_ms": 0.1}
        fields |= {"transfer_ms": 0.8, "latency_ms": 6.0, "divergence": 0.02, "samples": shares}
        fields |= {"left_ms_ago": 9.0, "met_ms_ago": 7.0, "back_ms_ago": 3.0, "bytes": 178_500}
        events.append(Event(t, rank, "round", fields))
        events.append(Event(t, rank, "counts", {"slot": 30 * number, "counts": shares, "anchor": 10.0 + number}))
        shares = [share + number % 3 for share in shares]
    events += [
        Event((epoch + 1) * end // epochs - 1, rank, "epoch", entry) for epoch, entry in enumerate(history(epochs))
    ]
    return events


def history(epochs: int = 3) -> list[dict[str, Any]]:
    return [
        {
            "epoch": epoch + 1,
            "samples": 10_000 * (epoch + 1),
            "train_loss": 1.0 / (epoch + 1),
            "lr": 0.1,
            "train_seconds": 2.0 * (epoch + 1),
            "samples_per_s": 5_000.0,
            "accuracy": 0.9 + 0.01 * epoch,
            "loss": 1.1 / (epoch + 1),
        }
        for epoch in range(epochs)
    ]
