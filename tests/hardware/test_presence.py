"""Whether a machine may take part now: pure decisions over readings, and readings from a made-up /dev and /sys."""

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from uneven.cli.main import app
from uneven.errors import InputError
from uneven.hardware.presence import (
    IDLE_S,
    Between,
    Machine,
    Presence,
    Readings,
    Rules,
    on_battery,
    parse_between,
    typed_s,
    wait_until_free,
)

NOON = datetime(2026, 11, 17, 12, 0)


def at(clock: str) -> datetime:
    return datetime.fromisoformat(f"2026-03-29T{clock}")  # clocks change on this day in much of Europe


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22:00-07:00", ["22:00", "23:59", "00:00", "02:30", "06:59"], ["07:00", "12:00", "21:59"]),
        ("9-17:30", ["09:00", "17:29"], ["08:59", "17:30", "00:00"]),
        ("12:00-13:00, 20:00-06:30", ["12:30", "05:00"], ["13:00", "06:30"]),
        ("18:00-24:00", ["18:00", "23:59"], ["00:00", "17:59"]),
        ("24:00-06:00", ["00:00"], ["23:59"]),
    ],
)
def test_a_span_of_the_day_also_over_midnight(text: str, inside: list[str], outside: list[str]) -> None:
    spans = parse_between(text)
    assert all(any(span.holds(at(clock)) for span in spans) for clock in inside)
    assert not any(span.holds(at(clock)) for span in spans for clock in outside)


@pytest.mark.parametrize(
    "text", ["", "22:00", "22:00-", "22-22:00", "0:00-24:00", "25:00-07:00", "22:60-07:00", "22:00-07:00-08:00", "a-b"]
)
def test_a_span_that_is_none_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match=r"between=.*allowed are .*22:00-07:00") as refused:
        parse_between(text)
    assert "\n" not in str(refused.value)


def test_a_span_reads_as_it_is_written() -> None:
    assert str(Between(22 * 60, 7 * 60 + 5)) == "22:00-07:05"


def test_without_rules_a_machine_always_takes_part() -> None:
    busy = Readings(0.0, NOON, 1.0, 16.0, 0.0, on_battery=True)
    assert Presence(Rules()).answer(busy).may


def test_what_a_machine_cannot_tell_does_not_keep_it_away() -> None:
    rules = Rules(only_when_idle=True, between=parse_between("11-13"), on_battery=False)
    assert Presence(rules).answer(Readings(0.0, NOON)).may


def test_the_reasons_are_told() -> None:
    night = Presence(Rules(between=parse_between("22:00-07:00")))
    assert night.answer(Readings(0.0, NOON)).why == "it is 12:00, and it takes part between 22:00-07:00"
    laptop = Presence(Rules(on_battery=False))
    assert laptop.answer(Readings(0.0, NOON, on_battery=True)).why == "it runs on battery"
    assert laptop.answer(Readings(1.0, NOON, on_battery=False)).may


def test_somebody_who_types_keeps_it_away_for_five_minutes() -> None:
    presence = Presence(Rules(only_when_idle=True))
    assert "typed in a terminal 2 min ago" in presence.answer(Readings(1000.0, NOON, typed_s=130.0)).why
    assert presence.answer(Readings(1000.0 + IDLE_S - 130.0, NOON, typed_s=IDLE_S)).may
    assert presence.answer(Readings(2000.0, NOON, typed_s=1130.0)).may
    answer = presence.answer(Readings(2005.0, NOON, typed_s=1.0))
    assert not answer.may, "at once"
    assert "just now" in answer.why
    assert not presence.answer(Readings(2004.0 + IDLE_S - 1.0, NOON, typed_s=IDLE_S - 1.0)).may
    assert presence.answer(Readings(2004.0 + IDLE_S, NOON, typed_s=IDLE_S)).may


def test_a_burst_is_no_use_but_a_busy_program_is() -> None:
    presence = Presence(Rules(only_when_idle=True))
    loads = [0.0, 0.9, 0.0, 0.9, 0.0]
    assert all(presence.answer(Readings(5.0 * i, NOON, load, 8 * load)).may for i, load in enumerate(loads))
    assert presence.answer(Readings(25.0, NOON, 0.5, 4.0)).may
    assert "other programs used 4.0 cores just now" in presence.answer(Readings(30.0, NOON, 0.5, 4.0)).why
    assert not presence.answer(Readings(29.0 + IDLE_S, NOON, 0.0, 0.0)).may
    assert presence.answer(Readings(30.0 + IDLE_S, NOON, 0.0, 0.0)).may


def test_a_fifth_of_a_small_machine_is_no_use() -> None:
    presence = Presence(Rules(only_when_idle=True))
    assert all(presence.answer(Readings(float(i), NOON, 0.3, 0.6)).may for i in range(5))


def test_it_waits_until_it_may_and_says_each_reason_once() -> None:
    def readings() -> Iterator[Readings]:
        for second in range(3):
            yield Readings(float(second), NOON, typed_s=0.0, on_battery=True)
        for second in range(3, 6):
            yield Readings(float(second), NOON, typed_s=float(second), on_battery=False)
        yield Readings(400.0, NOON, typed_s=400.0, on_battery=False)

    found, said, slept = readings(), [], []
    wait_until_free(
        Presence(Rules(only_when_idle=True, on_battery=False)), said.append, lambda: next(found), slept.append
    )
    assert [line.partition(": ")[2] for line in said[:-1]] == [
        "it runs on battery",
        "somebody typed in a terminal just now, and it takes part after 5 min without use",
    ]
    assert said[-1] == "this machine is free now"
    assert next(found, None) is None
    assert len(slept) == 6


def test_no_rules_read_nothing() -> None:
    wait_until_free(None, print, lambda: pytest.fail("read"))


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_last_input_of_any_terminal_counts(tmp_path: Path) -> None:
    assert typed_s(tmp_path, 1000.0) is None
    for name, read_s in (("0", 400.0), ("1", 940.0), ("ptmx", 999.0)):
        os.utime(put(tmp_path / "dev/pts" / name), (read_s, 0.0))
    assert typed_s(tmp_path, 1000.0) == pytest.approx(60.0)
    assert typed_s(tmp_path, 900.0) == 0.0


def test_the_power_supply(tmp_path: Path) -> None:
    supplies = tmp_path / "sys/class/power_supply"
    put(supplies / "mouse/type", "Battery\n")
    put(supplies / "mouse/scope", "Device\n")
    assert on_battery(tmp_path) is None
    put(supplies / "BAT0/type", "Battery\n")
    put(supplies / "BAT0/status", "Discharging\n")
    assert on_battery(tmp_path) is True
    put(supplies / "AC/type", "Mains\n")
    put(supplies / "AC/online", "1\n")
    assert on_battery(tmp_path) is False
    put(supplies / "AC/online", "0\n")
    assert on_battery(tmp_path) is True


def test_this_machine_can_be_read() -> None:
    machine = Machine()
    first, second = machine.read(), machine.read()
    assert first.busy_share is None
    assert second.at_s >= first.at_s
    assert Presence(Rules()).answer(second).may


def test_join_refuses_a_span_before_it_looks_for_the_leader() -> None:
    result = CliRunner().invoke(app, ["join", "127.0.0.1:1", "--token", "t" * 20, "--between", "late"])
    assert isinstance(result.exception, InputError)
    assert "between='late'" in str(result.exception)
