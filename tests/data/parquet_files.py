"""Parquet files as far as their footer goes: a schema that must be skipped, rows and row groups."""

from pathlib import Path


def write_parquet(path: Path, groups: list[int], size: int = 0) -> None:
    """A file with so many rows in each row group, and at least `size` bytes."""
    column = b"\x48" + _binary(b"text") + b"\0"  # field 4: a name
    schema = b"\x15\x02" + b"\x19\x2c" + column * 2  # field 1: version 1; field 2: a list of 2 structs
    rows = b"\x16" + _zigzag(sum(groups))  # field 3
    listed = b"\x19" + bytes([len(groups) << 4 | 12]) + b"".join(b"\x36" + _zigzag(one) + b"\0" for one in groups)
    footer = schema + rows + listed + b"\0"
    body = b"PAR1" + bytes(max(size - len(footer) - 12, 0))
    path.write_bytes(body + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def _zigzag(value: int) -> bytes:
    value <<= 1
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def _binary(value: bytes) -> bytes:
    return bytes([len(value)]) + value
