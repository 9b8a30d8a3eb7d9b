"""A terminal as a person sees it: what stands on it after everything that was written."""

import io
import re

_CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]+")


class Screen(io.StringIO):
    """A stream that is a terminal; `fileno` is that of a file which several of a test's streams may have in common."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self._number = number

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def rows(self) -> list[str]:
        """Its lines, without empty ones at the end. Knows what rich writes: lines, and the way back to erase them."""
        rows, row, column = [""], 0, 0
        for found in _CODE.finditer(self.getvalue()):
            text, kind = found.group(), found.group(2)
            if text == "\r" or text == "\n":
                row, column = row + (text == "\n"), 0
                rows += [""] * (row + 1 - len(rows))
            elif kind == "A":
                row = max(0, row - int(found.group(1) or 1))
            elif kind == "K":
                rows[row] = ""
            elif kind is None:
                rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + len(text) :]
                column += len(text)
        return "\n".join(line.rstrip() for line in rows).rstrip("\n").split("\n")
