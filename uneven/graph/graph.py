"""Graph: a flow as an nn.Module. Its forward is code that torch.fx wrote from the plan."""

import difflib
import hashlib
import linecache
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import fx, nn

from uneven.errors import InputError
from uneven.graph.memory import Memory
from uneven.graph.plan import Plan
from uneven.graph.structure import structure_of
from uneven.graph.tofx import to_fx

if TYPE_CHECKING:
    from typing_extensions import Self

    from uneven.graph.profile import Profile


class Graph(nn.Module):
    """Made by `FlowBuilder.build`. Its modules are ordinary children under readable names.

    Invariant: `plan` and the children say everything; the fx graph and the code follow from them, and are made anew
    in every copy.
    """

    def __init__(self, plan: Plan, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.plan = plan
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the nodes' values, once an example ran
        for name, module in modules.items():
            self.add_module(name, module)
        self._write()

    @property
    def fx(self) -> fx.Graph:
        """The computation as torch.fx sees it; `fx.GraphModule(graph, graph.fx)` is for its tools."""
        return self._fx

    @property
    def code(self) -> str:
        """The forward that runs, as Python."""
        return self._fx.python_code("self").src

    @property
    def structure(self) -> str:
        """What makes this graph this graph, line by line: nodes, their modules and sources, but no values."""
        return "\n".join(structure_of(self))

    @property
    def structural_hash(self) -> str:
        return hashlib.sha256(self.structure.encode()).hexdigest()[:16]

    def reset_state(self) -> None:
        """Forget what was remembered across calls, here and in sub-graphs."""
        for module in self.modules():
            if isinstance(module, Memory):
                module.reset()

    def at(self, path: str) -> nn.Module:
        """The module under a dotted path of labels, tags and names; "" is the graph itself."""
        known = dict(self.named_modules(remove_duplicate=False))
        if path not in known:
            close = difflib.get_close_matches(path, list(known), 3)
            hint = f"did you mean {', '.join(close)}?" if close else f"it has {', '.join(n for n in known if n)}"
            raise InputError(f"the graph has no part {path!r}: {hint}")
        module: nn.Module = known[path]
        return module

    def parameters_at(self, path: str) -> list[nn.Parameter]:
        return list(self.at(path).parameters())

    def freeze(self, path: str = "") -> "Self":
        """No gradients for the params under a path, until `thaw`."""
        self.at(path).requires_grad_(False)
        return self

    def thaw(self, path: str = "") -> "Self":
        self.at(path).requires_grad_(True)
        return self

    def save(self, path: str | Path) -> None:
        """Params and buffers as safetensors under their names, with the structure they belong to."""
        try:
            save_model(self, str(path), {"structure": self.structure})
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot write {path}: {error}") from error

    def load(self, path: str | Path) -> "Self":
        """What `save` wrote, if it was this structure; else InputError with the difference."""
        if not Path(path).is_file():
            raise InputError(f"there is no file {path}")
        try:
            with safe_open(str(path), framework="pt") as file:
                structure = (file.metadata() or {}).get("structure")
            self.check_structure(structure, str(path))
            load_model(self, path)
        except SafetensorError as error:
            raise InputError(f"{path} is no safetensors file: {error}") from error
        except RuntimeError as error:
            raise InputError(f"{path} does not fit the graph: {error}") from error
        return self

    def check_structure(self, structure: str | None, what: str) -> None:
        """InputError with a diff where params belong to another graph than this one."""
        if structure is None or structure == self.structure:
            return
        lines = difflib.unified_diff(
            structure.split("\n"), self.structure.split("\n"), what, "this graph", n=1, lineterm=""
        )
        raise InputError(f"{what} belongs to another graph:\n" + "\n".join(lines))

    def draw(self, path: str | Path | None = None, *, profile: "Profile | None" = None) -> str:
        """The graph as SVG, or as DOT if the path ends in .dot; with a profile the time of each node as heat."""
        from uneven.graph.draw import draw

        return draw(self, None if path is None else Path(path), profile)

    def profile(self, *batch: Any, repeats: int = 10) -> "Profile":
        """Time and bytes of every node, on this batch."""
        from uneven.graph.profile import profile

        return profile(self, batch, repeats)

    def summary(self) -> str:
        """A table of nodes, with the shapes of the last example and the numbers of params."""
        from uneven.graph.summary import summary

        return summary(self)

    def extra_repr(self) -> str:
        return self.plan.label

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_fx", "forward")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._write()

    def _write(self) -> None:
        """Make the fx graph of the plan, and its code this graph's forward."""
        self._fx = to_fx(self.plan)
        # In the instance, so that its signature is seen and torch.compile keeps graphs apart by their code.
        self.__dict__["forward"] = MethodType(_function(self._fx, self.plan.label), self)


def _function(graph: fx.Graph, label: str) -> Any:
    """The forward of an fx graph. Graphs of one code share it, as objects of one class share their methods."""
    code = graph.python_code("self")
    if code.src not in _FUNCTIONS:
        file = f"<graph {label or 'without label'} {hashlib.sha256(code.src.encode()).hexdigest()[:8]}>"
        linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)  # for tracebacks
        names = dict(code.globals)
        exec(compile(code.src, file, "exec"), names)
        _FUNCTIONS[code.src] = names["forward"]
    return _FUNCTIONS[code.src]


_FUNCTIONS: dict[str, Any] = {}  # by source
