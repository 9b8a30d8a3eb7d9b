import pytest

from uneven.format import align_columns, format_bytes, format_clock, format_count, format_gib


def test_numbers_get_their_unit() -> None:
    assert [format_count(number, "rank") for number in (0, 1, 2, None)] == ["0 ranks", "1 rank", "2 ranks", "? ranks"]
    assert [format_gib(size) for size in (None, 3 * 2**29)] == ["?", "1.5 GiB"]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 kB"), (178_500, "178.5 kB"), (1_400_000, "1.4 MB"), (2.5e12, "2,500.0 GB")]
)
def test_sizes_get_a_unit_that_keeps_them_short(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(None, "-:--"), (-1.0, "0:00"), (65.9, "1:05"), (7265.0, "2:01:05")])
def test_times_are_written_as_a_clock_does(seconds: float | None, text: str) -> None:
    assert format_clock(seconds) == text


def test_columns_are_as_wide_as_their_widest_entry() -> None:
    assert align_columns([("a", "n", ""), ("bcd", "10", "e")], right=[1]) == ["a     n", "bcd  10  e"]
