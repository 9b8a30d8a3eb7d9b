"""The engines that may have started this process as a rank: torchrun, Slurm, Kubernetes' PyTorchJob.

Pure functions of the variables, but for torchrun's agent, whose command line names the rendezvous. Read once by
launch/context.py, and by `uneven run`, which takes part as that rank. The innermost engine counts: torchrun inside of
srun is torchrun. One variable alone is no engine: a RANK may be left over from anything.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from uneven.errors import InputError
from uneven.launch.environment import LaunchEnvironment, new_member_id
from uneven.launch.external.slurm import expand_nodes, parse_tasks_per_node

VARIABLES = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
C10D_PORT = 29400  # torchrun's own, where --rdzv-endpoint names none
FIRST_PORT, NUM_PORTS = 15000, 10000  # for a store of ours: above the services, below the ports of connections


def read_engine(environ: Mapping[str, str] = os.environ) -> LaunchEnvironment | None:
    """What the engine that started this process says about it; None where nobody started it as one of several.

    InputError for variables that cannot be, or that contradict each other.
    """
    if (found := _read_torchrun(environ) or _read_variables(environ)) is None:
        _refuse_mpirun(environ)
    return found or _read_slurm(environ)


def _read_torchrun(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    if "TORCHELASTIC_RUN_ID" not in environ or "RANK" not in environ:
        return None
    rank, world_size = _place(environ, "RANK", "WORLD_SIZE")
    has_agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port, variable = _need(environ, "MASTER_ADDR"), _port(environ), f"MASTER_ADDR={environ['MASTER_ADDR']}"
    local_rank, local_size = _local(environ, rank, world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    # The c10d rendezvous hands out the hostname of its first machine, which others may not know; the endpoint is an
    # address that every agent has reached. Its store serves as well as the other one.
    if has_agent_store and local_size != world_size and (endpoint := agent_endpoint(environ)) is not None:
        host, port = endpoint
        variable = f"--rdzv-endpoint {host}:{port}"
    return LaunchEnvironment(
        *("torchrun", rank, world_size, local_rank, local_size, host, port),
        f"uneven/{environ['TORCHELASTIC_RUN_ID']}/",
        has_store=has_agent_store,
        node=_optional(environ, "GROUP_RANK"),
        variable=variable,
        member=_member(local_rank, rank),
    )


def _read_variables(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """The four variables of torch's env://, as Kubernetes' PyTorchJob and many scripts set them."""
    given = {**environ}
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in given and f"PET_{name}" in given:
            given[name] = given[f"PET_{name}"]
    is_pod = "KUBERNETES_SERVICE_HOST" in given or any(name.startswith("PET_") for name in given)
    _refuse_pods_for_torchrun(given, is_pod)
    names = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not given.get(name)]
    if "RANK" not in given or "WORLD_SIZE" not in given or len(names) == 2:
        return None
    rank, world_size = _place(given, "RANK", "WORLD_SIZE")
    if world_size == 1:
        return None  # one process, which may start ranks itself
    if names:
        other = ({"MASTER_ADDR", "MASTER_PORT"} - {*names}).pop()
        raise InputError(
            f"RANK={rank}, WORLD_SIZE={world_size} and {other}={given[other]} without {names[0]}: a rank needs all of "
            f"{VARIABLES}; export {names[0]}=..., or unset RANK to train in this process alone"
        )
    slurm_rank = _optional(given, "SLURM_PROCID")
    if slurm_rank is not None and _optional(given, "SLURM_NTASKS") == world_size and slurm_rank != rank:
        raise InputError(
            f"RANK={rank} contradicts SLURM_PROCID={slurm_rank}: both count {world_size} processes; unset RANK, or "
            "set it for each task: srun bash -c 'RANK=$SLURM_PROCID python train.py'"
        )
    local_rank, local_size = _local(given, rank, world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return LaunchEnvironment(
        "PyTorchJob" if is_pod else "RANK and WORLD_SIZE",
        *(rank, world_size, local_rank, local_size, given["MASTER_ADDR"], _port(given), "uneven/"),
        has_store=False,
        node=_optional(given, "PET_NODE_RANK", "GROUP_RANK"),
        variable=f"MASTER_ADDR={given['MASTER_ADDR']}",
        is_kubernetes=is_pod,
        member=_member(local_rank, rank),
    )


def _refuse_pods_for_torchrun(environ: Mapping[str, str], is_pod: bool) -> None:
    """InputError in a pod that was made for torchrun, which would start several processes in it."""
    if not is_pod or "LOCAL_RANK" in environ:
        return
    per_node, nodes = environ.get("PET_NPROC_PER_NODE", "1"), environ.get("PET_NNODES", "1")
    if "RANK" in environ and per_node != "1":
        raise InputError(
            f"PET_NPROC_PER_NODE={per_node} with RANK={environ['RANK']} and no LOCAL_RANK: this pod is to run several "
            "processes, which torchrun starts; use as its command: torchrun train.py"
        )
    if "RANK" not in environ and nodes not in ("", "1") and environ.get("PET_RDZV_ENDPOINT"):
        raise InputError(
            f"PET_NNODES={nodes} and no RANK: this pod was made for torchrun, which reads PET_RDZV_ENDPOINT; "
            "use as its command: torchrun train.py"
        )


def _refuse_mpirun(environ: Mapping[str, str]) -> None:
    """InputError where Open MPI alone started this process: each would train the whole run for itself."""
    size = _optional(environ, "OMPI_COMM_WORLD_SIZE")
    if size is not None and size > 1:
        raise InputError(f"OMPI_COMM_WORLD_SIZE={size}: mpirun cannot start ranks; use uneven run, torchrun or srun")


def _read_slurm(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """A task of srun. A batch script has SLURM_PROCID=0, too: it runs once, whatever SLURM_NTASKS says."""
    is_step = any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
    if "SLURM_PROCID" not in environ or (not is_step and environ.get("ENVIRONMENT") == "BATCH"):
        return None
    count = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if name in environ), "")
    if not count:
        return None
    rank, world_size = _place(environ, "SLURM_PROCID", count)
    if world_size == 1:
        return None
    listed = next(
        (name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if name in environ), ""
    )
    nodes = expand_nodes(listed, environ[listed]) if listed else ()
    host = environ.get("MASTER_ADDR") or next(iter(nodes), "")
    if not host:
        raise InputError(
            f"SLURM_PROCID={rank} of {count}={world_size} without SLURM_JOB_NODELIST: nothing says where rank 0 is; "
            "start by srun, or export MASTER_ADDR=ADDRESS-OF-THE-FIRST-NODE"
        )
    node = _optional(environ, "SLURM_NODEID")
    local_rank, local_size = _local_slurm(environ, rank, world_size, node)
    job, step = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", "0")), environ.get("SLURM_STEP_ID", "0")
    derived = FIRST_PORT + crc32(f"{job}.{step}".encode()) % NUM_PORTS
    own = environ.get("SLURMD_NODENAME", "")
    return LaunchEnvironment(
        *("srun", rank, world_size, local_rank, local_size, host, _port(environ, derived), f"uneven/{job}.{step}/"),
        has_store=False,
        node=node,
        variable=f"MASTER_ADDR={host}" if environ.get("MASTER_ADDR") else f"{listed}={environ[listed]}",
        fallback=environ.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        peers=tuple(name for name in nodes if name != own),
        member=_member(local_rank, rank),
    )


def _local_slurm(
    environ: Mapping[str, str], rank: int, world_size: int, node: int | None
) -> tuple[int | None, int | None]:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environ and node is not None:
            counts = parse_tasks_per_node(name, environ[name])
            # Those of the job stand beside a step with fewer tasks: then they say nothing about it.
            if sum(counts) == world_size and node < len(counts):
                given = {**environ, name: str(counts[node])}
                return _local(given, rank, world_size, "SLURM_LOCALID", name)
    if _optional(environ, "SLURM_NNODES", "SLURM_JOB_NUM_NODES") == 1:
        given = {**environ, "SLURM_NTASKS": str(world_size)}
        return _local(given, rank, world_size, "SLURM_LOCALID", "SLURM_NTASKS")
    return _optional(environ, "SLURM_LOCALID"), None


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


def _member(local_rank: int | None, rank: int) -> str:
    return new_member_id(f"rank-{rank}" if local_rank is None else f"local-{local_rank}")


def _need(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise InputError(f"{name} is not set, but RANK={environ.get('RANK')} is: a rank needs all of {VARIABLES}")
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdecimal()):
        raise InputError(f"{name}={environ[name]!r} must be a whole number of 0 or more; unset it, or set it as it is")
    return int(text)


def _optional(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is set."""
    return next((_number(environ, name) for name in names if environ.get(name)), None)


def _place(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    _need(environ, size_name)
    rank, size = _number(environ, rank_name), _number(environ, size_name)
    if size < 1 or rank >= size:
        raise InputError(
            f"{rank_name}={rank} with {size_name}={size}: ranks count from 0 to {size_name} - 1; "
            "start every process with its own"
        )
    return rank, size


def _local(
    environ: Mapping[str, str], rank: int, world_size: int, rank_name: str, size_name: str
) -> tuple[int | None, int | None]:
    """This process among those of its machine; the roster tells it where the engine does not."""
    local_rank, local_size = _optional(environ, rank_name), _optional(environ, size_name)
    if local_size is not None and not 1 <= local_size <= world_size:
        raise InputError(f"{size_name}={local_size}: a machine has at least 1 and at most all {world_size} processes")
    most = world_size if local_size is None else local_size
    if local_rank is not None and (local_rank >= most or local_rank > rank):
        raise InputError(
            f"{rank_name}={local_rank} of rank {rank}: it is below {size_name}={most} and not above the rank; "
            "the engine sets it for each process"
        )
    return local_rank, local_size


def _port(environ: Mapping[str, str], default: int | None = None) -> int:
    if default is not None and not environ.get("MASTER_PORT"):
        return default
    _need(environ, "MASTER_PORT")
    port = _number(environ, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise InputError(f"MASTER_PORT={port} must be 1 to 65535; take one that is free on the machine of rank 0")
    return port
