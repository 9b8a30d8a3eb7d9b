"""A terminal at which a question is answered by a line, by Ctrl-C or by Ctrl-D, for tests of what asks."""

import io

CTRL_C, CTRL_D = "\x03", ""


class Terminal(io.StringIO):
    """In the place of sys.stdin: `input` reads a line of it as of a terminal."""

    def isatty(self) -> bool:
        return True

    def readline(self, *limits: int | None) -> str:  # type: ignore[override]
        if self.getvalue() == CTRL_C:
            raise KeyboardInterrupt
        return super().readline(*limits)
