"""A headless Chromium, controlled over two pipes: no port, no client library, and it ends with the test."""

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SILENCE_S = 100.0  # an upper limit: a page that never draws fails its test
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# Chromium reads commands from descriptor 3 and answers on 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)

# Resolves when the charts are drawn and painted.
_READY = """new Promise((done) => {
  const check = () => document.documentElement.dataset.ready && Bokeh.documents.every((doc) => doc.is_idle)
    ? done(true) : requestAnimationFrame(check);
  check();
})"""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page; `messages` holds what the browser has sent since the page was opened, in order."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser, self._session = browser, session
        self.messages: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, self.messages, **params)

    def open(self, path: Path) -> None:
        """Returns when the charts of the page are drawn."""
        self.messages.clear()
        answer = self.send("Page.navigate", url=path.as_uri())
        assert "errorText" not in answer, answer
        while not any(message["method"] == "Page.loadEventFired" for message in self.messages):
            self._browser.listen(self._session, self.messages)
        self.ask(_READY)

    def ask(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it is; AssertionError where it throws."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings of the page's console, and exceptions that nothing caught."""
        complaints = []
        for message in self.messages:
            params = message["params"]
            if message["method"] == "Runtime.exceptionThrown":
                complaints.append(str(params["exceptionDetails"]))
            elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                complaints.append(str(params["args"]))
            elif message["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                complaints.append(str(params["entry"]))
        return complaints

    def requests(self) -> list[str]:
        return [
            message["params"]["request"]["url"]
            for message in self.messages
            if message["method"] == "Network.requestWillBeSent"
        ]


class Browser:
    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._unread = b""
        self._number = 0

    def tab(self) -> Tab:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        return Tab(self, self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])

    def send(
        self, method: str, session: str | None = None, messages: list[dict[str, Any]] | None = None, **params: Any
    ) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._commands, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = self.listen(session, messages)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def listen(self, session: str | None, messages: list[dict[str, Any]] | None) -> dict[str, Any]:
        """The next message; messages of this session are also appended to `messages`."""
        while b"\0" not in self._unread:
            assert select.select([self._answers], [], [], SILENCE_S)[0], "the browser does not answer"
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has ended"
            self._unread += more
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if messages is not None and "method" in message and message.get("sessionId") == session:
            messages.append(message)
        return message


@contextmanager
def chromium(program: str, home: Path) -> Iterator[Browser]:
    """A browser with an empty profile in `home`."""
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    start = [sys.executable, "-c", _START, str(read_commands), str(write_answers), program]
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    quiet = ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={home}"]
    process = subprocess.Popen(
        [*start, *options, *quiet, "about:blank"],
        pass_fds=(read_commands, write_answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    browser = Browser(commands, answers)
    try:
        yield browser
        browser.send("Browser.close")
        process.wait(timeout=100)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
