"""`uneven run --engine ray` on a Ray that is made up: who is started where, and with which variables."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from uneven.errors import InputError, MachineError, RankError
from uneven.launch.external import ray_cluster
from uneven.launch.external.ray_cluster import plan_places, rank_variables, run_on_ray
from uneven.launch.external.variables import read_launcher
from uneven.launch.find_script import Script

NODES = [
    {"NodeID": "a", "Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}},
    {"NodeID": "b", "Alive": False, "Resources": {"GPU": 8.0}},
    {"NodeID": "c", "Alive": True, "Resources": {"CPU": 4.0}},
]


def test_one_rank_per_gpu_or_per_machine_without_any() -> None:
    assert plan_places(NODES, "auto") == [("a", 1), ("a", 1), ("c", 0)]
    assert plan_places(NODES, "cpu,cpu@0.5,cpu") == [("a", 0), ("a", 0), ("c", 0)]
    with pytest.raises(InputError, match="Ray chooses the GPUs"):
        plan_places(NODES, "cuda:1,cpu")
    with pytest.raises(MachineError, match="no node that is alive"):
        plan_places(NODES[1:2], "auto")


def test_the_variables_are_read_as_those_of_a_rank() -> None:
    read = [read_launcher(own) for own in rank_variables(["a", "a", "c"], "10.0.0.1", 1234)]
    places = [(one.rank, one.world_size, one.local_rank, one.local_world_size) for one in read if one is not None]
    assert places == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]


class FakeRay(ModuleType):
    """Actors are objects of this process, and their calls have happened when they return."""

    def __init__(self, codes: list[int]) -> None:
        super().__init__("ray")
        self.started: list[dict[str, Any]] = []
        self.killed = 0
        self._codes = codes
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def init(self, **options: Any) -> None:
        self.options = options

    def nodes(self) -> list[dict[str, Any]]:
        return NODES

    def remote(self, kind: type) -> Any:
        def start() -> Any:
            actor, number = kind(), len(self.started)
            self.started.append({"options": options})

            def run(order: str, variables: dict[str, str]) -> int:
                self.started[number] |= {"order": json.loads(order), "variables": variables}
                return self._codes[number]

            calls = {"place": actor.place, "run": run, "stop": actor.stop}
            return SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in calls.items()})

        options: dict[str, Any] = {}
        return SimpleNamespace(options=lambda **given: options.update(given) or SimpleNamespace(remote=start))

    def get(self, value: Any) -> Any:
        return value

    def kill(self, actor: Any) -> None:
        self.killed += 1


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import uneven\nuneven.fit()\n")
    return path


def use(monkeypatch: pytest.MonkeyPatch, codes: list[int]) -> FakeRay:
    ray = FakeRay(codes)
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = lambda node_id, soft: (node_id, soft)  # type: ignore[attr-defined]
    for name, module in (("ray", ray), ("ray.util", ModuleType("ray.util")), (strategies.__name__, strategies)):
        monkeypatch.setitem(sys.modules, name, module)
    return ray


def test_every_actor_starts_its_rank_on_its_node(monkeypatch: pytest.MonkeyPatch, script: Path) -> None:
    ray = use(monkeypatch, [0, 0, 0])
    run_on_ray(Script(script, ("x",)), {"epochs": 3, "shares": (1.0, 2.0)})
    assert ray.options["runtime_env"] == {"working_dir": str(script.parent)}
    assert [one["options"]["scheduling_strategy"][0] for one in ray.started] == ["a", "a", "c"]
    assert [one["options"]["num_gpus"] for one in ray.started] == [1, 1, 0]
    assert [one["variables"]["RANK"] for one in ray.started] == ["0", "1", "2"]
    assert len({one["variables"]["MASTER_PORT"] for one in ray.started}) == 1
    order = {"path": "train.py", "args": ["x"], "module": None, "settings": {"epochs": 3, "shares": [1.0, 2.0]}}
    assert all(one["order"] == order for one in ray.started)
    assert ray.killed == 3


def test_a_rank_that_fails_and_a_ray_that_is_not_there(monkeypatch: pytest.MonkeyPatch, script: Path) -> None:
    ray = use(monkeypatch, [0, 7, 0])
    with pytest.raises(RankError, match="rank 1 ended with code 7"):
        run_on_ray(Script(script), {})
    assert ray.killed == 3
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MachineError, match=r"ray is not installed here; run: pip install 'uneven\[ray\]'"):
        run_on_ray(Script(script), {})


def test_the_process_of_a_rank_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ray_cluster.main(json.dumps({"path": "nothing.py", "args": [], "settings": {}}))
    assert caught.value.code == 2
    assert "there is no such file" in capsys.readouterr().err
