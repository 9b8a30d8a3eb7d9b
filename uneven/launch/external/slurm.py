"""Slurm's compressed lists: of nodes, as in 'gpu[01-03,7],login', and of tasks per node, as in '2(x2),1'."""

import re

from uneven.errors import InputError

MOST_NODES = 100_000


def expand_nodes(variable: str, text: str) -> tuple[str, ...]:
    """The names of a node list in its order; a range keeps the width of its first number, as in [08-10]."""
    names: list[str] = []
    for part in _split(variable, text):
        names += _expand(variable, text, part)
        if len(names) > MOST_NODES:
            raise InputError(f"{variable}={text!r} names more than {MOST_NODES} nodes")
    return tuple(names)


def parse_tasks_per_node(variable: str, text: str) -> tuple[int, ...]:
    """'2(x2),1' -> (2, 2, 1)."""
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
