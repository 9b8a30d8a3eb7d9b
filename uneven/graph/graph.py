"""Graph: the module that `FlowBuilder.build` returns. A PlanModule with everything that users need as methods.

It imports describe, profile and drawing, and none of them imports it; only wiring and the builder do.
"""

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import nn

from uneven.errors import InputError
from uneven.graph.describe import structural_hash, structure_of, summary
from uneven.graph.drawing import draw
from uneven.graph.plan import PlanModule
from uneven.graph.profile import Profile, profile

if TYPE_CHECKING:
    from typing_extensions import Self


class Graph(PlanModule):
    """A flow as an nn.Module: it is trained, saved, compiled and moved like any other module."""

    @property
    def structure(self) -> str:
        """The nodes, their modules and sources line by line, without the values of params."""
        return structure_of(self)

    @property
    def structural_hash(self) -> str:
        return structural_hash(self)

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
        """Turn off gradients for the params under a path; `thaw` turns them on again."""
        self.at(path).requires_grad_(False)
        return self

    def thaw(self, path: str = "") -> "Self":
        self.at(path).requires_grad_(True)
        return self

    def save(self, path: str | Path) -> None:
        """Write params and buffers as safetensors under their names, together with the structure of the graph."""
        try:
            save_model(self, str(path), {"structure": self.structure})
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot write {path}: {error}") from error

    def load(self, path: str | Path) -> "Self":
        """Read what `save` wrote; InputError with a diff if it was another structure."""
        if not Path(path).is_file():
            raise InputError(f"there is no file {path}")
        try:
            with safe_open(str(path), framework="pt") as file:
                structure = (file.metadata() or {}).get("structure")
            self.check_structure(structure, str(path))
            load_model(self, path)
        except SafetensorError as error:
            raise InputError(f"{path} is not a safetensors file: {error}") from error
        except RuntimeError as error:
            raise InputError(f"{path} does not fit the graph: {error}") from error
        return self

    def check_structure(self, structure: str | None, what: str) -> None:
        """InputError with a diff if params belong to another graph than this one."""
        if structure is None or structure == self.structure:
            return
        lines = difflib.unified_diff(
            structure.split("\n"), self.structure.split("\n"), what, "this graph", n=1, lineterm=""
        )
        raise InputError(f"{what} belongs to another graph:\n" + "\n".join(lines))

    def draw(self, path: str | Path | None = None, *, profile: Profile | None = None) -> str:
        """A picture: .svg (drawn by Graphviz), .dot, or Mermaid (.mmd, and without a path); returns its text.

        With a profile, nodes show their time and are coloured by it.
        """
        return draw(self, None if path is None else Path(path), profile)

    def profile(self, *batch: Any, repeats: int = 10) -> Profile:
        """Measure time and bytes of every node on this batch."""
        return profile(self, batch, repeats)

    def summary(self) -> str:
        """A table of the nodes with their shapes (of the last example) and numbers of params."""
        return summary(self)
