"""Packed rows are read as they were written."""

import pytest

from uneven.policy.packed import pack_log, pack_rounds
from uneven.policy.recorded import Round


def test_rows_are_those_that_were_written() -> None:
    parts = [(slot, 4 * slot, 4) for slot in range(7)]
    log = pack_log(parts[:2])
    for part in parts[2:]:
        log.append(part)
    assert [*log] == parts
    assert log == parts
    assert log != parts[:-1]
    assert (log[0], log[-1], len(log)) == (parts[0], parts[-1], 7)
    assert log[2:5] == parts[2:5]
    assert log[5:] == parts[5:]
    assert log[:0] == []
    assert repr(log) == repr(parts)
    for index in (7, -8):
        with pytest.raises(IndexError):
            log[index]


def test_rounds_have_whole_slots_and_their_scale() -> None:
    rounds = [Round(2**50 + 1, 3, 4, 1 / 3), Round(0, 0, 0, 1.0)]
    packed = pack_rounds(rounds)
    assert [*packed] == rounds
    assert packed[0].due == 2**50 + 1
    assert all(isinstance(number, int) for number in packed[0][:3])
    assert packed[-1].scale == 1.0
