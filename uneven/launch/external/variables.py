"""Which launcher has started this process as a rank: torchrun, Slurm, or Kubernetes' PyTorchJob; by its variables.

Pure functions of the variables, but for torchrun's agent, whose command line names the rendezvous. Read once by
launch/context.py, and by `uneven run`, which takes part as that rank. The innermost launcher counts: torchrun inside of
srun is torchrun. One variable alone is none: a RANK may be left over from anything.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from uneven.errors import InputError
from uneven.launch.environment import LaunchEnvironment, new_member_id

NAMES = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
C10D_PORT = 29400  # torchrun's own, where --rdzv-endpoint names none
FIRST_PORT, NUM_PORTS = 15000, 10000  # for a store of ours: above the services, below the ports of connections
MOST_NODES = 100_000


def read_launcher(environ: Mapping[str, str] = os.environ) -> LaunchEnvironment | None:
    """What the launcher that started this process says about it; None where nobody started it as one of several.

    InputError for variables that cannot be, or that contradict each other.
    """
    variables = Variables(environ)
    found = _read_torchrun(variables) or _read_four(variables)
    if found is None and (size := variables.number("OMPI_COMM_WORLD_SIZE")) is not None and size > 1:
        # Each of its processes would train the whole run for itself.
        raise InputError(f"OMPI_COMM_WORLD_SIZE={size}: mpirun cannot start ranks; use uneven run, torchrun or srun")
    return found or _read_slurm(variables)


class Variables(dict[str, str]):
    """The environment, read with a line about what is wrong."""

    def need(self, name: str) -> str:
        if not self.get(name):
            raise InputError(f"{name} is not set, but RANK={self.get('RANK')} is: a rank needs all of {NAMES}")
        return self[name]

    def first(self, *names: str) -> str:
        """Which of these is set; empty where none is."""
        return next((name for name in names if self.get(name)), "")

    def number(self, *names: str) -> int | None:
        """The value of the first of these that is set."""
        if not (name := self.first(*names)):
            return None
        text = self[name].strip()
        if not (text.isascii() and text.isdecimal()):
            raise InputError(f"{name}={self[name]!r} must be a whole number of 0 or more; unset it, or set it as it is")
        return int(text)

    def place(self, rank_name: str, size_name: str) -> tuple[int, int]:
        """(rank, world size)"""
        self.need(rank_name)
        self.need(size_name)
        rank, size = self.number(rank_name) or 0, self.number(size_name) or 0
        if rank >= size:
            raise InputError(
                f"{rank_name}={rank} with {size_name}={size}: ranks count from 0 to {size_name} - 1; "
                "start every process with its own"
            )
        return rank, size

    def local(self, rank: int, world_size: int, rank_name: str, size_name: str) -> tuple[int | None, int | None]:
        """This process among those of its machine; the roster tells it where the launcher does not."""
        local_rank, local_size = self.number(rank_name), self.number(size_name)
        if local_size is not None and not 1 <= local_size <= world_size:
            what = "a machine has at least 1 and at most all"
            raise InputError(f"{size_name}={local_size}: {what} {world_size} processes")
        most = world_size if local_size is None else local_size
        if local_rank is not None and (local_rank >= most or local_rank > rank):
            raise InputError(
                f"{rank_name}={local_rank} of rank {rank}: it is below {size_name}={most} and not above the rank; "
                "the launcher sets it for each process"
            )
        return local_rank, local_size

    def port(self, default: int | None = None) -> int:
        if default is not None and not self.get("MASTER_PORT"):
            return default
        self.need("MASTER_PORT")
        port = self.number("MASTER_PORT") or 0
        if not 1 <= port <= 65535:
            raise InputError(f"MASTER_PORT={port} must be 1 to 65535; take one that is free on the machine of rank 0")
        return port


def _read_torchrun(variables: Variables) -> LaunchEnvironment | None:
    if "TORCHELASTIC_RUN_ID" not in variables or "RANK" not in variables:
        return None
    rank, world_size = variables.place("RANK", "WORLD_SIZE")
    has_agent_store = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = variables.need("MASTER_ADDR"), variables.port()
    said = f"MASTER_ADDR={host}"
    local_rank, local_size = variables.local(rank, world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    # The c10d rendezvous hands out the hostname of its first machine, which others may not know; the endpoint is an
    # address that every agent has reached. Its store serves as well as the other one.
    if has_agent_store and local_size != world_size and (endpoint := agent_endpoint(variables)) is not None:
        host, port = endpoint
        said = f"--rdzv-endpoint {host}:{port}"
    return LaunchEnvironment(
        launcher="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        host=host,
        port=port,
        prefix=f"uneven/{variables['TORCHELASTIC_RUN_ID']}/",
        has_store=has_agent_store,
        node=variables.number("GROUP_RANK"),
        variable=said,
        member=_member(local_rank, rank),
    )


def _read_four(variables: Variables) -> LaunchEnvironment | None:
    """The four variables of torch's env://, as Kubernetes' PyTorchJob and many scripts set them."""
    names = ("MASTER_ADDR", "MASTER_PORT")
    given = Variables({name: variables[f"PET_{name}"] for name in names if f"PET_{name}" in variables} | variables)
    is_pod = "KUBERNETES_SERVICE_HOST" in given or any(name.startswith("PET_") for name in given)
    if is_pod and "LOCAL_RANK" not in given:
        _refuse_pods_for_torchrun(given)
    missing = [name for name in names if not given.get(name)]
    if "RANK" not in given or "WORLD_SIZE" not in given or len(missing) == 2:
        return None
    rank, world_size = given.place("RANK", "WORLD_SIZE")
    if world_size == 1:
        return None  # one process, which may start ranks itself
    if missing:
        other = given.first(*names)
        raise InputError(
            f"RANK={rank}, WORLD_SIZE={world_size} and {other}={given[other]} without {missing[0]}: a rank needs all "
            f"of {NAMES}; export {missing[0]}=..., or unset RANK to train in this process alone"
        )
    slurm_rank = given.number("SLURM_PROCID")
    if slurm_rank is not None and given.number("SLURM_NTASKS") == world_size and slurm_rank != rank:
        raise InputError(
            f"RANK={rank} contradicts SLURM_PROCID={slurm_rank}: both count {world_size} processes; unset RANK, or "
            "set it for each task: srun bash -c 'RANK=$SLURM_PROCID python train.py'"
        )
    local_rank, local_size = given.local(rank, world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return LaunchEnvironment(
        launcher="PyTorchJob" if is_pod else "RANK and WORLD_SIZE",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        host=given["MASTER_ADDR"],
        port=given.port(),
        prefix="uneven/",
        has_store=False,
        node=given.number("PET_NODE_RANK", "GROUP_RANK"),
        variable=f"MASTER_ADDR={given['MASTER_ADDR']}",
        is_kubernetes=is_pod,
        member=_member(local_rank, rank),
    )


def _refuse_pods_for_torchrun(variables: Variables) -> None:
    """InputError in a pod that was made for torchrun, which would start several processes in it."""
    per_node, nodes = variables.get("PET_NPROC_PER_NODE", "1"), variables.get("PET_NNODES", "1")
    fix = "use as its command: torchrun train.py"
    if "RANK" in variables and per_node != "1":
        raise InputError(
            f"PET_NPROC_PER_NODE={per_node} with RANK={variables['RANK']} and no LOCAL_RANK: this pod is to run "
            f"several processes, which torchrun starts; {fix}"
        )
    if "RANK" not in variables and nodes not in ("", "1") and variables.get("PET_RDZV_ENDPOINT"):
        made_for = "this pod was made for torchrun, which reads PET_RDZV_ENDPOINT"
        raise InputError(f"PET_NNODES={nodes} and no RANK: {made_for}; {fix}")


def _read_slurm(variables: Variables) -> LaunchEnvironment | None:
    """A task of srun. A batch script has SLURM_PROCID=0, too: it runs once, whatever SLURM_NTASKS says."""
    is_step = any(name in variables for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
    count = variables.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if "SLURM_PROCID" not in variables or not count or (not is_step and variables.get("ENVIRONMENT") == "BATCH"):
        return None
    rank, world_size = variables.place("SLURM_PROCID", count)
    if world_size == 1:
        return None
    listed = variables.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = expand_nodes(listed, variables[listed]) if listed else ()
    host = variables.get("MASTER_ADDR") or next(iter(nodes), "")
    if not host:
        raise InputError(
            f"SLURM_PROCID={rank} of {count}={world_size} without SLURM_JOB_NODELIST: nothing says where rank 0 is; "
            "start by srun, or export MASTER_ADDR=ADDRESS-OF-THE-FIRST-NODE"
        )
    local_rank, local_size = _local_slurm(variables, rank, world_size)
    job = variables.get("SLURM_JOB_ID", variables.get("SLURM_JOBID", "0"))
    step = f"{job}.{variables.get('SLURM_STEP_ID', '0')}"
    return LaunchEnvironment(
        launcher="srun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        host=host,
        port=variables.port(FIRST_PORT + crc32(step.encode()) % NUM_PORTS),
        prefix=f"uneven/{step}/",
        has_store=False,
        node=variables.number("SLURM_NODEID"),
        variable=f"MASTER_ADDR={host}" if variables.get("MASTER_ADDR") else f"{listed}={variables[listed]}",
        fallback=variables.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        peers=tuple(name for name in nodes if name != variables.get("SLURMD_NODENAME")),
        member=_member(local_rank, rank),
    )


def _local_slurm(variables: Variables, rank: int, world_size: int) -> tuple[int | None, int | None]:
    node = variables.number("SLURM_NODEID")
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in variables and node is not None:
            counts = parse_tasks_per_node(name, variables[name])
            # Those of the job stand beside a step with fewer tasks: then they say nothing about it.
            if sum(counts) == world_size and node < len(counts):
                given = Variables({**variables, name: str(counts[node])})
                return given.local(rank, world_size, "SLURM_LOCALID", name)
    if variables.number("SLURM_NNODES", "SLURM_JOB_NUM_NODES") == 1:
        given = Variables({**variables, "SLURM_NTASKS": str(world_size)})
        return given.local(rank, world_size, "SLURM_LOCALID", "SLURM_NTASKS")
    return variables.number("SLURM_LOCALID"), None


def _member(local_rank: int | None, rank: int) -> str:
    return new_member_id(f"rank-{rank}" if local_rank is None else f"local-{local_rank}")


def agent_endpoint(
    environ: Mapping[str, str], commands: Sequence[Sequence[str]] | None = None
) -> tuple[str, int] | None:
    """(host, port) of torchrun's c10d rendezvous, from PET_RDZV_* or the command line of the agent above this process.

    None for the static rendezvous, whose address is MASTER_ADDR, and where the agent cannot be found.
    """
    options = {name: environ.get(f"PET_{name.upper()}", "") for name in ("rdzv_backend", "rdzv_endpoint")}
    for words in commands if commands is not None else _commands_above():
        found = _options(words)
        if found.keys() & {"rdzv_backend", "rdzv_endpoint"}:
            options |= found
            break
    endpoint = options["rdzv_endpoint"]
    if options["rdzv_backend"] != "c10d" or not endpoint:
        return None
    host, colon, port = endpoint.rpartition(":") if endpoint.count(":") == 1 or "]" in endpoint else (endpoint, "", "")
    if colon and (not port.isdecimal() or port == "0"):
        return None
    host = host.strip("[]")
    return (host, int(port or C10D_PORT)) if host else None


def _options(words: Sequence[str]) -> dict[str, str]:
    """torchrun's options about the rendezvous, as 'a-b VALUE' or '--a_b=VALUE'."""
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if word.startswith("--") and name in ("rdzv_backend", "rdzv_endpoint"):
            found[name] = value if equals else following
    return found


def _commands_above(generations: int = 4) -> list[list[str]]:
    """The command lines of the processes that this one descends from, nearest first."""
    commands, pid = [], os.getppid()
    with suppress(OSError, ValueError, IndexError):
        for _ in range(generations):
            commands.append(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return commands


def expand_nodes(variable: str, text: str) -> tuple[str, ...]:
    """The names of Slurm's node list in its order, as gpu[08-10,7],login; a range keeps the width of its first."""
    names: list[str] = []
    for part in _split(variable, text):
        names += _expand(variable, text, part)
        if len(names) > MOST_NODES:
            raise InputError(f"{variable}={text!r} names more than {MOST_NODES} nodes")
    return tuple(names)


def parse_tasks_per_node(variable: str, text: str) -> tuple[int, ...]:
    """Slurm's '2(x2),1' -> (2, 2, 1)."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part, re.ASCII)
        if match is None or int(match[2] or 1) > MOST_NODES:
            raise InputError(f"{variable}={text!r} must be numbers as in '2(x2),1': tasks, and on how many nodes")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _split(variable: str, text: str) -> list[str]:
    """At the commas outside of brackets."""
    parts, depth = [""], 0
    for character in text.strip():
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            break
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth != 0 or not all(parts):
        raise InputError(f"{variable}={text!r} must be a list of nodes as in 'node[01-03,7],other'")
    return parts


def _expand(variable: str, text: str, part: str) -> list[str]:
    """One name with brackets at any place; several of them give every combination."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    names = []
    for span in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
        if match is None or not first <= last < first + MOST_NODES:
            raise InputError(f"{variable}={text!r}: {span!r} must be a number or a range as in 01-03")
        for number in range(first, last + 1):
            names += [f"{before}{number:0{len(match[1])}}{tail}" for tail in _expand(variable, text, after)]
    return names
