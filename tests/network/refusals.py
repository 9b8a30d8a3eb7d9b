"""Runs over machines that must not start, one fault each: how long until every machine has ended, and with what words.

`python -m tests.network.refusals` prints the table; test_refusals.py holds it. Versions, formats and clocks are faults
of what a machine says about itself (`FAULTS`, in a sitecustomize.py of that machine), the rest is real: files, tokens,
addresses, a firewall.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.network.namespaces import PYTHONPATH, Family, Machine, ip, network

TOKEN, PORT = "a-token-of-the-tests", "29400"
SCRIPT = """
from pathlib import Path
import torch
import uneven

class Lines:
    def __init__(self, path):
        self.path = path
        self.lines = Path(path).read_text().split()
    def __len__(self):
        return len(self.lines)
    def __getitem__(self, index):
        return torch.tensor([float(self.lines[index])])

uneven.fit(
    model=lambda: torch.nn.Linear(1, 1), optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    step=lambda model, batch: model(batch).square().mean(), dataset=Lines("data.txt"), batch_size=2, epochs=1,
)
"""
NATIVE = "import uneven.hardware.choices as choices\nchoices.native_precisions = lambda *_: {formats!r}\n"
FAULTS = {
    "clock": "import time\nreal = time.time\ntime.time = lambda: real() + 60.0\n",
    "bf16": NATIVE.format(formats=("fp32", "bf16")),
    "no bf16": NATIVE.format(formats=("fp32",)),
}


@dataclass(frozen=True)
class Case:
    """One fault. `words` are in the output of every machine."""

    name: str
    words: tuple[str, ...]
    leader_words: tuple[str, ...] = ()  # of the leader instead, where it cannot know what the other side knows
    faults: dict[int, str] = field(default_factory=dict)  # of FAULTS, by machine
    files: dict[str, str] = field(default_factory=dict)  # that are others on the last machine
    settings: tuple[str, ...] = ()  # of the run
    wait: tuple[str, ...] = ()  # of the leader, where nobody can tell it that nobody comes
    token: str = TOKEN  # of the last machine
    cut: Callable[[Sequence[Machine]], None] = lambda _: None
    machines: int = 2
    family: Family = "v4"


def no_ipv4(machines: Sequence[Machine]) -> None:
    last = machines[-1]
    ip("-n", last.namespace, "addr", "del", f"{last.address}/24", "dev", last.interface)


def metadata(version: str) -> dict[str, str]:
    """What pip leaves for a package, before the real one on the path."""
    text = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    return {f"site/torch-{version}.dist-info/METADATA": text}


WAIT = ("--wait", "5")
PLACE = f"uneven join 10.77.0.1:{PORT}"
CASES = (
    Case("torch", ("node2: torch is 2.9.1, the leader's is ", "pip install torch=="), files=metadata("2.9.1")),
    Case("old torch", ("node2: torch 2.1.0 is too old", "run: uneven setup"), files=metadata("2.1.0")),
    Case("script", ("node2: train.py differs", "rsync"), files={"train.py": SCRIPT + "# another line\n"}),
    Case("data file", ("node2: the content of data.txt in path is ", "--skip data"),
         files={"data.txt": "1 2 3 4 5 6 7 9"}),
    Case("token", (f"10.77.0.1:{PORT}: the leader refused: wrong token; take the line that the leader printed",),
         ("10.77.0.2 had a wrong token", PLACE), token="another-token", wait=WAIT),
    Case("dtype", ("node2: precision='bf16' on cpu", "not native", "--precision auto"),
         faults={0: "bf16", 1: "no bf16"}, settings=("--precision", "bf16")),
    Case("family", ("node2 has no way to an IPv4 address", "--bind and an IPv6 address"),
         ("1 of 2 machines were there", PLACE), cut=no_ipv4, family="dual", wait=WAIT),
    Case("firewall", ("node3: the way from node2 (10.77.0.2) is closed", "sudo ufw allow from 10.77.0.2"), machines=3,
         cut=lambda machines: machines[2].drop_from(machines[1])),
    Case("firewall of node2", ("no leader at 10.77.0.1", "sudo ufw allow from 10.77.0.1"),
         ("node2: the way from node1 (10.77.0.1) is closed", "sudo ufw allow from 10.77.0.1"),
         cut=lambda machines: machines[1].drop_from(machines[0])),
    Case("firewall of node1", ("no leader at 10.77.0.1", "its firewall lets the port in"),
         ("1 of 2 machines were there", f"let port {PORT} in by the firewall of node1"),
         cut=lambda machines: machines[0].drop_from(machines[1]), wait=WAIT),
    Case("clock", ("node2: the clock is 60 s ahead of the leader's", "timedatectl"), faults={1: "clock"}),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
DOOR, SLURM = "uneven join", "Slurm"
# Under another launcher there is no token, and a rank that does not reach the store waits for it: rank 0 may be late.
UNDER_SLURM = ("torch", "script", "data file", "dtype", "firewall", "clock")


@dataclass(frozen=True)
class Ended:
    """How each machine ended."""

    codes: list[int]
    seconds: list[float]
    outputs: list[str]
    left: list[list[int]]  # processes


def run_case(case: Case, launcher: str, folder: Path, limit_s: float = 60.0) -> Ended:
    """Start it on all machines at once; the seconds count from there."""
    with network(folder, case.machines, family=case.family) as machines:
        case.cut(machines)
        began_s = time.monotonic()
        processes = [_start(case, launcher, machines, number, folder) for number in range(len(machines))]
        seconds = _await(processes, began_s, limit_s)
        left = [machine.pids() for machine in machines]
        for process in processes:
            if process.poll() is None:
                process.kill()
        outputs = [process.communicate(timeout=30)[0] for process in processes]
    return Ended([process.returncode for process in processes], seconds, outputs, left)


def _start(
    case: Case, launcher: str, machines: Sequence[Machine], number: int, folder: Path
) -> "subprocess.Popen[str]":
    machine, is_last = machines[number], number == len(machines) - 1
    place = folder / machine.hostname
    files = {
        "train.py": SCRIPT,
        "data.txt": "1 2 3 4 5 6 7 8",
        "site/sitecustomize.py": FAULTS.get(case.faults.get(number, ""), ""),
    }
    files |= case.files if is_last else {}
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    env = {"UNEVEN_DATA": str(place / "cache"), "PYTHONPATH": f"{place / 'site'}:{PYTHONPATH}"}
    if launcher == SLURM:
        env |= _slurm(number, machines)
        return machine.python("-m", "uneven", "run", *case.settings, "train.py", env=env, cwd=place)
    env["UNEVEN_TOKEN"] = case.token if is_last else TOKEN
    if number:
        return machine.python("-m", "uneven", "join", f"{machines[0].address}:{PORT}", env=env, cwd=place)
    words = ("--nodes", str(len(machines)), "--port", PORT, "--devices", "cpu", *case.wait, *case.settings, "train.py")
    return machine.python("-m", "uneven", "run", *words, env=env, cwd=place)


def _slurm(number: int, machines: Sequence[Machine]) -> dict[str, str]:
    size = len(machines)
    return {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(number), "SLURM_NTASKS": str(size),
        "SLURM_NODEID": str(number), "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": f"1(x{size})",
        "SLURM_STEP_NODELIST": f"node[1-{size}]", "SLURMD_NODENAME": machines[number].hostname,
    }  # fmt: skip


def _await(processes: Sequence["subprocess.Popen[str]"], began_s: float, limit_s: float) -> list[float]:
    """When each of them has ended, in seconds; nan where one has not."""
    ended = [float("nan")] * len(processes)
    while time.monotonic() - began_s < limit_s and any(seconds != seconds for seconds in ended):
        for number, process in enumerate(processes):
            if ended[number] != ended[number] and process.poll() is not None:
                ended[number] = time.monotonic() - began_s
        time.sleep(0.02)
    return ended


def last_word(output: str) -> str:
    """The line of the refusal."""
    return next((line for line in reversed(output.splitlines()) if line.startswith("uneven: ")), output[-300:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="cases; all without one")
    parser.add_argument("--launcher", choices=(DOOR, SLURM))
    given = parser.parse_args()
    for launcher in (DOOR, SLURM):
        for case in CASES:
            if (given.names and case.name not in given.names) or given.launcher not in (None, launcher):
                continue
            if launcher == SLURM and case.name not in UNDER_SLURM and not given.names:
                continue
            with tempfile.TemporaryDirectory() as folder:
                ended = run_case(case, launcher, Path(folder))
            seconds = "  ".join(f"{one:5.1f}" for one in ended.seconds)
            print(f"{launcher:12} {case.name:18} codes {ended.codes}  seconds {seconds}", flush=True)
            for number, output in enumerate(ended.outputs, 1):
                print(f"    node{number}: {last_word(output)}", flush=True)


if __name__ == "__main__":
    main()
