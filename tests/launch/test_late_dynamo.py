"""torch._dynamo in a rank: not there for an optimizer, and whole for whoever compiles."""

import subprocess
import sys
from textwrap import dedent

SETUP = """
import sys
from uneven.launch.late_dynamo import load_dynamo_late
load_dynamo_late()
import torch

def is_loaded():
    return "torch._dynamo.eval_frame" in sys.modules

model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()

first = step(torch.ones(2, 3))
assert not is_loaded()
"""


def run(code: str) -> str:
    command = [sys.executable, "-c", SETUP + dedent(code)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_an_optimizer_steps_without_it() -> None:
    assert run("print(step(torch.ones(2, 3)) < first, is_loaded())") == "True False\n"


def test_a_default_group_forms_without_it() -> None:
    code = """
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        print(is_loaded())
    """
    assert run(code) == "False\n"


def test_what_looks_through_all_modules_does_not_load_it() -> None:
    assert run("import inspect; inspect.getmodule(inspect.currentframe()); print(is_loaded())") == "False\n"


def test_it_is_whole_for_torch_compile() -> None:
    """And what was not to be traced before is not traced now."""
    code = """
        compiled = torch.compile(step, backend="eager")
        losses = [step(torch.ones(2, 3)), compiled(torch.ones(2, 3)), compiled(torch.ones(2, 3))]
        assert is_loaded() and sorted(losses, reverse=True) == losses
        module = sys.modules["torch._dynamo"]
        zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
        print(type(module).__name__, module is torch._dynamo, module.__loader__ is module.__spec__.loader)
        print(getattr(getattr(zero_grad, "__dynamo_disable")._call, "_torchdynamo_disable", False))
    """
    assert run(code) == "module True True\nTrue\n"


def test_what_is_inside_loads_it_first() -> None:
    for line in (
        "import torch._dynamo.utils",
        "from torch._dynamo import config",
        "torch._dynamo.trace_rules.lookup",
        "torch._dynamo.reset()",
        "assert torch.compiler.disable()(step)(torch.ones(2, 3)) < first",
    ):
        assert run(f"{line}; print(is_loaded())") == "True\n"


def test_a_second_thread_waits_until_it_is_loaded() -> None:
    code = """
        import threading
        found = []
        threads = [threading.Thread(target=lambda: found.append(torch._dynamo.is_compiling())) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(found)
    """
    assert run(code) == "[False, False, False, False]\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert run("print(hasattr(torch._dynamo, 'nothing'), is_loaded())") == "False True\n"
