"""`uneven run --engine ray`: one actor per device of a Ray cluster, each with the variables of a rank.

An actor only starts `python -m uneven.launch.external.ray_cluster ORDER`, which runs the script as `uneven run` does
under any launcher, in a process of its own: signals and the main thread are the script's. The script's folder
travels as Ray's working_dir. Ray is no dependency of the package (`pip install 'uneven[ray]'`) and is imported inside.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from uneven.errors import STOPPED, InputError, MachineError, RankError
from uneven.hardware.device import parse_devices
from uneven.launch.find_script import Script
from uneven.launch.script import check_script, refuse_plain_script, run_script


def run_on_ray(script: Script, settings: Mapping[str, Any]) -> None:
    """The script on every GPU of the cluster, or one process per machine without any; RankError where a rank fails."""
    check_script(script, settings)
    ray = import_ray()
    ray.init(runtime_env={"working_dir": str(script.folder)}, ignore_reinit_error=True)
    places = plan_places(ray.nodes(), settings.get("devices", "auto"))
    if len(places) > 1:
        refuse_plain_script(script, len(places))
    here = replace(script, path=script.inner_path)  # as it lies in the working_dir
    order = json.dumps({**here.to_json(), "path": str(here.path), "settings": _as_json(settings)})
    actors = [_start_actor(ray, node, gpus) for node, gpus in places]
    try:
        address, port = ray.get(actors[0].place.remote())
        variables = rank_variables([node for node, _ in places], address, port)
        running = [actor.run.remote(order, own) for actor, own in zip(actors, variables, strict=True)]
        codes = ray.get(running)
    except KeyboardInterrupt:
        ray.get([actor.stop.remote() for actor in actors])
        ray.wait(running, num_returns=len(running), timeout=30)
        raise
    finally:
        for actor in actors:
            ray.kill(actor)
    failed = [f"rank {rank} ended with code {code}" for rank, code in enumerate(codes) if code]
    if failed:
        raise RankError(f"{'; '.join(failed)}; its own output above says why")


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MachineError("--engine ray: ray is not installed here; run: pip install 'uneven[ray]'") from error
    return ray


def plan_places(nodes: Sequence[Mapping[str, Any]], devices: str) -> list[tuple[str, int]]:
    """(node id, GPUs) of every rank, node by node: one per GPU, or one for a node without any.

    Named devices are CPUs, spread over the nodes in turn: which GPU a process gets is Ray's to say.
    """
    alive = [node for node in nodes if node.get("Alive")]
    if not alive:
        raise MachineError("--engine ray: the cluster has no node that is alive; see: ray status")
    if devices != "auto":
        named = parse_devices(devices)
        if any(device.kind != "cpu" for device in named):
            raise InputError(f"--devices {devices} with --engine ray: Ray chooses the GPUs; leave --devices out")
        counts = [len(range(place, len(named), len(alive))) for place in range(len(alive))]
        return [(str(node["NodeID"]), 0) for node, count in zip(alive, counts, strict=True) for _ in range(count)]
    places = []
    for node in alive:
        gpus = int(node.get("Resources", {}).get("GPU", 0))
        places += [(str(node["NodeID"]), 1)] * gpus or [(str(node["NodeID"]), 0)]
    return places


def rank_variables(nodes: Sequence[str], address: str, port: int) -> list[dict[str, str]]:
    """What each rank finds in its environment: torchrun's names."""
    common = {"WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    local = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    return [
        {
            **common,
            "RANK": str(rank),
            "LOCAL_RANK": str(local[rank]),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
        }
        for rank, node in enumerate(nodes)
    ]


class RayRank:
    """The actor of one rank: starts its process and waits for it. Two calls at once: `stop` comes during `run`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, int]:
        """The address at which Ray knows this machine, and a port that is free on it."""
        import ray

        address = str(ray.util.get_node_ip_address())
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
            return address, int(server.getsockname()[1])

    def run(self, order: str, variables: Mapping[str, str]) -> int:
        command = [sys.executable, "-m", "uneven.launch.external.ray_cluster", order]
        self._process = subprocess.Popen(command, env={**os.environ, **variables})
        return self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)


def _start_actor(ray: Any, node: str, gpus: int) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_node = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    # One CPU at most: Ray counts cores, and what is left of them is shared out among the ranks of a machine by us.
    options = {"num_cpus": 0 if gpus else 1, "num_gpus": gpus, "scheduling_strategy": on_node, "max_concurrency": 2}
    return ray.remote(RayRank).options(**options).remote()


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def main(order: str) -> None:
    told = json.loads(order)
    try:
        run_script(Script.from_json(told), told["settings"])
    except (InputError, MachineError, RankError) as error:
        print(f"uneven: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(STOPPED)


if __name__ == "__main__":
    main(sys.argv[1])
