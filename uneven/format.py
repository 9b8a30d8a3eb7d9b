"""How numbers and tables are written for people, in every room."""

from collections.abc import Collection, Sequence

GIB = 2**30


def printable(text: str, keep: str = "") -> str:
    """The text with all that could move a terminal's cursor, colour it or hide something written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def format_count(number: int | None, noun: str) -> str:
    """'1 rank', '2 ranks'; '? ranks' where the number is not known."""
    return f"{'?' if number is None else number} {noun}{'' if number == 1 else 's'}"


def format_gib(size: int | None) -> str:
    """The size of a memory or a disk."""
    return "?" if size is None else f"{size / GIB:.1f} GiB"


def format_bytes(size: float) -> str:
    """The size of data, in powers of 1000 as files and networks count."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def format_ns(ns: float) -> str:
    return f"{ns / 1e9:.2f} s" if ns >= 1e9 else f"{ns / 1e6:.3g} ms" if ns >= 1e4 else f"{ns / 1e3:.3g} us"


def format_clock(seconds: float | None) -> str:
    """'1:05' or '2:01:05', as a progress bar shows it."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def align_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for each row, with columns as wide as their widest entry; those in `right` are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [entry.rjust(width) if place in right else entry.ljust(width) for place, (entry, width) in enumerate(pairs)]
        for pairs in (zip(row, widths, strict=True) for row in rows)
    ]
    return ["  ".join(row).rstrip() for row in cells]
