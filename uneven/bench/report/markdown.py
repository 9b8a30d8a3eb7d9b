"""A report as Markdown: for README pages, issues and terminals."""

from uneven.bench.report.build import Report
from uneven.bench.report.sections import Table, sections_of


def render_markdown(report: Report) -> str:
    first, *others = sections_of(report)
    parts = [f"# {first.title}", *map(_block, first.blocks)]
    for section in others:
        parts += [f"## {section.title}", *map(_block, section.blocks)]
    return "\n\n".join(parts) + "\n"


def _block(block: str | Table) -> str:
    if isinstance(block, str):
        return f"`{block[2:]}`" if block.startswith("$ ") else block
    lines = [block.head, ["---"] * len(block.head), *block.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
