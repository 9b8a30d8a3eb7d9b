"""How many row groups and rows a Parquet file has, read from its footer alone: no library, no data.

A loader that takes row groups by number reads other samples where files of the same name were written with other row
groups, so data/file_list.py compares them between machines. The footer is a struct in Thrift's compact protocol; its
field 3 is the number of rows, and field 4 the list of row groups.
"""

from pathlib import Path

MAGIC = b"PAR1"
MOST_FOOTER = 64 << 20


def row_groups(path: Path) -> tuple[int, int] | None:
    """(row groups, rows) of a Parquet file; None where it is none, or is damaged."""
    try:
        with path.open("rb") as file:
            file.seek(-8, 2)
            tail = file.read(8)
            size = int.from_bytes(tail[:4], "little")
            if tail[4:] != MAGIC or not 0 < size <= MOST_FOOTER:
                return None
            file.seek(-8 - size, 2)
            return _Footer(file.read(size)).read()
    except (OSError, IndexError, ValueError):
        return None


class _Footer:
    """A reader of the fields of one struct, which skips what is not asked for."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def read(self) -> tuple[int, int]:
        rows, groups, field = 0, 0, 0
        while (head := self._byte()) != 0:
            field = field + (head >> 4) if head >> 4 else self._zigzag()
            if field == 3:
                rows = self._zigzag()
            elif field == 4:
                groups, _ = self._list_head()
                return groups, rows
            else:
                self._skip(head & 15)
        raise ValueError("a footer without row groups")

    def _byte(self) -> int:
        self._place += 1
        return self._data[self._place - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _list_head(self) -> tuple[int, int]:
        """(entries, their type)."""
        head = self._byte()
        return (head >> 4 if head >> 4 < 15 else self._varint()), head & 15

    def _skip(self, kind: int, is_entry: bool = False) -> None:
        """A value: 1, 2 booleans, 3 a byte, 4-6 integers, 7 a double, 8 bytes, 9, 10 a list or set, 12 a struct."""
        if kind in (1, 2):
            self._place += is_entry  # in a field the type itself is the value
        elif kind == 3:
            self._place += 1
        elif kind in (4, 5, 6):
            self._varint()
        elif kind == 7:
            self._place += 8
        elif kind == 8:
            length = self._varint()
            self._place += length
        elif kind in (9, 10):
            entries, inner = self._list_head()
            for _ in range(entries):
                self._skip(inner, is_entry=True)
        elif kind == 12:
            while (head := self._byte()) != 0:
                if not head >> 4:
                    self._zigzag()
                self._skip(head & 15)
        else:
            raise ValueError(f"type {kind} in a footer")
