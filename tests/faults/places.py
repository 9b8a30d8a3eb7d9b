"""Where a run of the storm runs: in one process tree, or on machines that are network namespaces, with a full disk.

`place(case, folder)` starts the run and yields it; when the block ends nothing of it is left. Names of namespaces are
random, so that several runs may be on at once. Used by one_run.py.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path

from tests.faults.cases import Case
from tests.faults.training import run_folder
from tests.forked import ForkedPopen, RealPopen
from tests.network.namespaces import PYTHONPATH, Machine, _enter, network
from tests.network.namespaces import why_impossible as why_no_namespaces

START = "from tests.faults.training import main; main()"
LEAD = (
    "import sys; from pathlib import Path; from uneven.launch.watch import lost; "
    "from tests.faults import training; "
    "lost.SILENT_S = float(sys.argv.pop(1)); training.note_generations(Path.cwd()); "
    "from uneven.cli.main import main; main()"
)
TOKEN, PORT = "a-token-of-the-storm", "29400"
DISK_MB = 32  # of a disk that is to be full
MORE_S = "0.2"  # for which a leader waits for more machines than it needs


class Place:
    """A run that was started: its launchers by machine, the leader's first."""

    def __init__(self, case: Case, folder: Path, machines: list[Machine]) -> None:
        self.case, self.folder, self._machines = case, folder, machines
        self.launchers: list[subprocess.Popen[bytes]] = []
        self._filler = folder / "disk" / "filler"

    def start(self) -> None:
        if not self._machines:
            self._start(0, "-c", START, str(self.folder))
            return
        fewest, most = len(self.case.machines), len(self._machines)
        nodes = str(fewest) if fewest == most else f"{fewest}-{most}"
        (self.folder / "train.py").write_text(START + "\n")
        options = ["--nodes", nodes, "--port", PORT, "--devices", ",".join(self.case.devices_on(0)), "--wait"]
        options += ["60" if fewest == most else MORE_S, "train.py", str(self.folder)]
        self._start(0, "-c", LEAD, str(self.case.silent_s), "run", *options)
        for machine in range(1, fewest):
            self.join(machine)

    def join(self, machine: int) -> None:
        place, devices = f"{self._machines[0].address}:{PORT}", ",".join(self.case.devices_on(machine))
        # A leader that is gone is soon given up; one that only starts is waited for.
        wait = "60" if machine < len(self.case.machines) else "8"
        self._start(machine, "-m", "uneven", "join", place, "--wait", wait, "--devices", devices)

    def cut(self, machine: int) -> None:
        self._machines[machine].pull_cable()

    def plug_in(self, machine: int) -> None:
        self._machines[machine].plug_in()

    def fill_disk(self) -> None:
        with suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass

    def free_disk(self) -> None:
        self._filler.unlink(missing_ok=True)

    def _start(self, machine: int, *words: str) -> None:
        env = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": "1", "UNEVEN_TOKEN": TOKEN}
        inside = None
        if self._machines:
            at = self._machines[machine]
            inside = partial(_enter, at.namespace, at.hostname, str(at.hosts))
        with (self.folder / f"said-{machine}").open("w") as said:
            process = ForkedPopen(
                [sys.executable, *words], cwd=self.folder, stdout=said, stderr=said, stdin=subprocess.DEVNULL,
                env=env, start_new_session=True, preexec_fn=inside,
            )  # fmt: skip
        self.launchers.append(process)


@contextmanager
def place(case: Case, folder: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        if case.kind == "full":
            stack.enter_context(_small_disk(folder / "disk"))
        count = len(case.machines) + case.joins
        machines = stack.enter_context(network(folder, count)) if case.has_network else []
        found = Place(case, folder, machines)
        found.start()
        yield found


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """What is on it afterwards stays, as a folder."""
    folder.mkdir()
    _command("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder))
    try:
        yield
    finally:
        kept = folder.with_name("disk-kept")
        _command("cp", "-a", str(folder), str(kept))
        _command("umount", "-l", str(folder))
        folder.rmdir()
        kept.rename(folder)


def _command(*words: str) -> None:
    with RealPopen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        error = process.communicate()[1]
    if process.returncode:
        raise OSError(f"{' '.join(words)}: {error.strip()}")


@cache
def why_no_mount() -> str | None:
    """Why no disk of its own can be made here, or None where it can."""
    with tempfile.TemporaryDirectory() as home:
        try:
            with _small_disk(Path(home) / "disk"):
                return None
        except OSError as error:
            return str(error)


def why_left_out() -> dict[str, str]:
    """The kinds of faults that this system does not permit, and why; "machines" for runs on several."""
    found = {}
    if (why := why_no_namespaces()) is not None:
        found["machines"] = why
    if (why := why_no_mount()) is not None:
        found["full"] = why
    return found


__all__ = ["Place", "place", "run_folder", "why_left_out"]
