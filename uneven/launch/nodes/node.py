"""`uneven join`: this machine takes part in a run that another one leads. It never loads torch; its ranks do.

Script, arguments and settings come from the leader, devices are this machine's own. From the start to the end of the
run the connection to the leader is open: when it breaks, or the leader is silent, the ranks here are ended.

[Note: permitted] Whoever has the token chooses script and arguments. Without a rule that was any file of this machine,
such as the module timeit of the standard library, which takes code as an argument. So it is the script that was named
to `uneven join`, or a file below the folder in which that was typed, equal to the leader's, and no part of an
environment that lies there.
"""

import json
import shlex
import signal
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from uneven.config import check_settings
from uneven.errors import InputError, MachineError, RankError, RefusedError, Terminated
from uneven.files import is_users_code
from uneven.format import printable
from uneven.hardware.device import Device
from uneven.hardware.preflight import refuse_unsupported
from uneven.launch.cleanup import make_private_folder, remove, remove_left_on_disk
from uneven.launch.control.leave_requests import ENDS, RequestFiles, await_readers
from uneven.launch.control.listing import LEFT, Listing, listed, new_run_id
from uneven.launch.find_script import Script
from uneven.launch.local_ranks import LocalRanks, RunPlan, local_ranks, own_devices
from uneven.launch.signals import SIGNALS, Stoppable, terminated_while_waiting
from uneven.machines.addresses import host_label
from uneven.machines.code import differing, script_digests
from uneven.machines.door import knock, split_place
from uneven.machines.facts import collect_facts, stamped
from uneven.machines.links import Listener, Peer, reach
from uneven.machines.session import Session
from uneven.machines.wire import WireError
from uneven.train.requests import GRACE_S
from uneven.version import __version__

T = TypeVar("T")

WAIT_S = 8.0  # for a leader that is not there yet
ORDER_S = 30.0
START_S = 24 * 3600.0  # the leader may wait for others as long as it likes
POLL_S = 0.05
SIGNAL = "signal"  # the name of a request to leave that is no file
ENVIRONMENTS = ("pyvenv.cfg", "conda-meta", "lib-dynload")  # what lies in the folders of a Python
NAME_IT = "to run it nevertheless, name it: uneven join ADDRESS:PORT SCRIPT"
MOST_TEXT = 20_000  # of a failed rank's message or traceback


@dataclass(frozen=True)
class JoinOptions:
    """What `uneven join` was told."""

    place: str
    token: str
    devices: str = "auto"
    script: Path | None = None  # in place of the leader's path
    wait: float = WAIT_S


def join_run(options: JoinOptions, say: Callable[[str], None]) -> None:
    """Take part from beginning to end. Errors and exit codes as the leader has them; RefusedError where it refuses."""
    with terminated_while_waiting() as waiting:
        _join(options, say, waiting)


def _join(options: JoinOptions, say: Callable[[str], None], waiting: Stoppable) -> None:
    address, port = split_place(options.place)
    try:
        session = Session(knock(address, port, options.token, options.wait))
    except InputError as error:
        raise RefusedError(str(error)) from error
    folder = make_private_folder()
    try:
        Node(options, session, folder, (address, port), say, waiting).run()
    except WireError as error:
        raise RankError(f"the leader at {options.place} is lost: {error}") from error
    except (KeyboardInterrupt, Terminated) as error:
        session.send(left=f"it was ended by {'SIGTERM' if isinstance(error, Terminated) else 'Ctrl-C'}")
        raise
    finally:
        session.close()
        await_readers(folder)
        remove(folder)
        remove_left_on_disk()


class Node:
    """One machine in one run: `run` once. Everything that it writes is below `folder`.

    `waiting` is what signals mean until its ranks start.
    """

    def __init__(
        self,
        options: JoinOptions,
        session: Session,
        folder: Path,
        place: tuple[str, int],
        say: Callable[[str], None],
        waiting: Stoppable,
    ) -> None:
        self._options = options
        self._session = session
        self._folder = folder
        self._say = say
        self._waiting = waiting
        self._door = (*place, options.token)
        self._order: Mapping[str, Any] = {}
        self._leader = options.place
        self._code: Mapping[str, str] = {}  # the digests that the leader was told
        self._devices: tuple[Device, ...] = ()
        self._departure = Departure(session, folder, say)

    def run(self) -> None:
        self._session.send(role="node", version=__version__, host=host_label())
        self._order = self._hear("order", timeout_s=ORDER_S)["order"]
        self._leader = f"{self._order['host'] or 'the leader'} ({self._session.address})"
        self._try(refuse_unsupported)
        script = self._try(find_permitted, self._order, self._options.script)
        self._say(f"{self._leader} wants to run here: {describe_command(script)}")
        listener = self._try(self._listen)
        try:
            go = self._prepare(script, listener)
        finally:
            listener.close()
        placement = RunPlan.from_json(go["go"], self._door, self._session.own_address)
        try:
            self._check_start(script, placement, go["settings"])
        except InputError as error:
            self._session.send(left=str(error))
            raise
        names = ", ".join(f"{rank} ({placement.roster.devices[rank]})" for rank in placement.ranks)
        if placement.joins is None:
            self._say(f"rank {names} of {len(placement.members)} start here; progress is shown on the leader")
        else:
            self._say(f"rank {names} joins the run that is on when it is ready; progress is shown on the leader")
        order = {**script.to_json(), "settings": go["settings"], "code": self._code, "closed": _outside(go["settings"])}
        run_id = self._order["run"] or new_run_id()
        with listed(Listing(order["path"], run_id=run_id, leader=self._leader, folder=self._folder)) as listing:
            self._train(placement, order, listing)
            if self._departure.has_left:
                listing.close(LEFT)

    def _prepare(self, script: Script, listener: Listener) -> dict[str, Any]:
        """Answer the leader until it says go; its message."""
        facts = self._try(self._collect, script)
        self._code, self._devices = facts["code"], own_devices(facts)
        self._session.send(facts=stamped(facts), port=listener.port)
        while "go" not in (message := self._hear("go", "reach", timeout_s=START_S)):
            if message["machine"] >= len(message["reach"]):
                raise WireError("it sent a bad message: machine must be one of those to be reached")
            self._say(f"joined {self._leader}: {len(message['reach'])} machines")
            peers = [Peer(host, address, port) for host, address, port in message["reach"]]
            report = reach(message["machine"], peers, listener, self._options.token)
            self._session.send(reached=report)
        return message

    def _check_start(self, script: Script, placement: RunPlan, settings: Mapping[str, Any]) -> None:
        """Before a rank starts: whatever the leader thinks of it, only what may run here does, with devices of ours."""
        if why := why_not_run(self._order, self._options.script, self._code):
            raise InputError(f"{self._leader} wants to start a script that is not run here: {why}")
        if script_digests(script.path, script.folder, script.package) != self._code:
            raise InputError(f"{script} has changed since it was compared with the leader's; join again")
        if placement.devices != self._devices:
            raise InputError(f"{self._leader} wants other devices than {','.join(map(str, self._devices))}")
        check_settings(settings)

    def _listen(self) -> Listener:
        return Listener(self._session.own_address, self._options.token, self._order["ports"])

    def _collect(self, script: Script) -> dict[str, Any]:
        """This machine's facts, with devices that can train."""
        names = [name.strip() for name in self._options.devices.split(",")]
        is_there = script.path.is_file()
        facts = collect_facts(script_digests(script.path, script.folder, script.package) if is_there else {}, names)
        own_devices(facts)
        return facts

    def _try(self, read: Callable[..., T], *args: Any) -> T:
        """What this machine finds by itself; where it cannot, the leader is told and ends the run for all."""
        try:
            return read(*args)
        except (InputError, MachineError) as error:
            self._session.send(cannot=str(error))
            with suppress(WireError):
                self._hear(timeout_s=ORDER_S)
            raise

    def _train(self, placement: RunPlan, order: dict[str, Any], listing: Listing) -> None:
        """Start the ranks, report how they do, and obey the leader to the end."""
        grace_s = float(order["settings"].get("grace", GRACE_S))
        stoppable = Stoppable(lambda: grace_s, self._departure.on_signal)
        SIGNALS.add(stoppable, signal.SIGINT, signal.SIGTERM)
        SIGNALS.discard(self._waiting)
        try:
            with local_ranks(self._folder, placement, order, self._say_all) as ranks:
                end = self._watch(ranks, placement.ranks[0], listing)
        finally:
            SIGNALS.discard(stoppable)
        self._finish(end)

    def _watch(self, ranks: LocalRanks, first: int, listing: Listing) -> dict[str, Any]:
        """Until the leader says that the run is over; WireError where it is gone."""
        told: tuple[list[int | None], set[int]] = ([], set())
        while True:
            codes, stopped = ranks.exit_codes(), ranks.stopped()
            if (codes, stopped) != told:
                told = (codes, stopped)
                known = {"codes": codes, "stopped": sorted(stopped)}
                self._session.send(**known, errors=self._errors(), unused=self._unused(first))
            self._departure.look()
            message = self._session.take(POLL_S)
            if message is None:
                if self._session.why_lost is not None:
                    raise WireError(self._session.why_lost)
                continue
            if "answer" in message:
                self._departure.hear(message)
                continue
            if "status" in message:
                listing.show(message["status"])
            if "give_up" in message:
                self._give_up(ranks, message["give_up"])
            if "watched" in message:
                self._session.watch()  # the leader has loaded torch, which may stop all of its threads
            if "refused" in message:
                raise RefusedError(f"refused by {self._leader}: {message['refused']}")
            if "dropped" in message:
                again = f"to bring it back: uneven join {self._options.place}"
                raise RankError(f"{self._leader} goes on without this machine: {message['dropped']}; {again}")
            if "end" in message:
                return message

    def _give_up(self, ranks: LocalRanks, number: int) -> None:
        if number not in ranks.numbers:
            raise WireError(f"it sent a bad message: give_up {number}, and no such rank is here")
        ranks.give_up(number)

    def _say_all(self, lines: list[str]) -> None:
        for line in lines:
            self._say(line)

    def _errors(self) -> dict[str, Any]:
        found = {}
        for path in self._folder.glob("error-*.json"):
            report = json.loads(path.read_text())
            # Far below what a line may hold: a message of megabytes would look like a machine that is lost.
            short = {name: value[-MOST_TEXT:] if isinstance(value, str) else value for name, value in report.items()}
            found[path.stem.removeprefix("error-")] = short
        return found

    def _unused(self, first: int) -> list[int]:
        """Which of the ranks here have ended without calling uneven."""
        return [int(path.name.removeprefix("unused-")) - first for path in self._folder.glob("unused-*")]

    def _hear(self, *keys: str, timeout_s: float) -> dict[str, Any]:
        """The leader's next message; its refusal is an error."""
        message = self._session.expect(*keys, "refused", "end", timeout_s=timeout_s)
        if "refused" in message:
            raise RefusedError(f"refused by {self._leader}: {message['refused']}")
        if "end" in message:
            if not message["end"] and not message["code"]:
                raise RefusedError(f"refused by {self._leader}: the run was over before this machine could join")
            self._finish(message)
            raise SystemExit(0)  # `uneven preflight` there: nothing is trained
        return message

    def _finish(self, message: Mapping[str, Any]) -> None:
        """As the leader ended: return, or raise what leads to the same exit code."""
        reason, code = message["end"], message["code"]
        self._departure.has_left = bool(message.get("has_left"))
        if code == 0:
            self._say(reason or f"trained; {self._leader} has the results")
            return
        if code in (130, 143):
            self._say(reason)
            raise Terminated if code == 143 else KeyboardInterrupt
        kind = {2: InputError, 3: MachineError}.get(code, RankError)
        raise kind(f"{self._leader} ended the run: {reason}")


def _outside(settings: Mapping[str, Any]) -> str | None:
    """The folder for results that the leader names, where it is not below this one: ranks here write nothing to it."""
    out = Path(settings.get("out") or ".").resolve()
    return None if out.is_relative_to(Path.cwd().resolve()) else str(out)


class Departure:
    """How this machine goes on purpose: a signal or `uneven leave` here has its ranks hand in what they have trained.

    The leader lets them (launch/watch/turnover.py), or says why not. Life cycle: one per joined machine and run; `look`
    often, `hear` what the leader answers, on one thread.
    """

    def __init__(self, session: Session, folder: Path, say: Callable[[str], None]) -> None:
        self._session = session
        self._files = RequestFiles(folder)
        self._say = say
        self._names: set[str] = set()  # of requests by files that are not answered
        self._signal: int | None = None
        self.has_left = False  # all ranks here have left on purpose

    def on_signal(self, number: int) -> None:
        """SIGTERM or Ctrl-C, on the signals' thread: leave; a second one ends this process (launch/signals.py)."""
        self._signal = number
        self._say(f"{signal.Signals(number).name}: this machine hands in what it has trained and leaves")
        self._session.send(leave=SIGNAL, is_urgent=1)

    def look(self) -> None:
        """Pass on what was asked for since, and what was withdrawn."""
        for name, ranks in self._files.take().items():
            self._names.add(name)
            self._session.send(leave=name, ranks=ranks)
        for name in [name for name in self._names if not self._files.is_open(name)]:
            self._names.discard(name)
            self._session.send(stays=name)

    def hear(self, message: Mapping[str, Any]) -> None:
        """The leader's answer to one of the requests."""
        name = message["answer"]
        answer = {key: message[key] for key in ("left", "refused") if key in message}
        if name == SIGNAL:
            if answer.get("refused", ENDS) != ENDS:
                self._say(f"the run cannot go on without this machine ({answer['refused']}): it stops, and is saved")
                self._session.send(stop=self._signal)
        elif name in self._names and self._files.is_open(name):
            self._names.discard(name)
            self._files.answer(name, answer)


def find_permitted(order: Mapping[str, Any], named: Path | None) -> Script:
    """The script of an order, which need not be there yet; InputError where it must not be run: [Note: permitted]."""
    module, path = order["module"], Path(order["script"]) if named is None else named
    try:
        whole = path.resolve()  # once: a link may lead elsewhere later
        script = Script(whole, tuple(order["args"]), module)
        is_other = whole.exists() and not stat.S_ISREG(whole.stat().st_mode)
        if named is None:
            _check_place(path, whole)
        if module is not None and script.inner_path.with_suffix("") != Path(module.replace(".", "/")):
            raise InputError(f"script {_quoted(path)} is not the module {module} that the leader runs; name its file")
        if named is None and not script.folder.is_relative_to(Path.cwd().resolve()):
            raise InputError(f"script {_quoted(path)}: the module {module} begins outside of this folder; {NAME_IT}")
    except (OSError, RuntimeError, IndexError) as error:  # a name that is too long, links in a circle, too many dots
        raise InputError(f"script {_quoted(path)} cannot be looked at here: {error}") from error
    if is_other:
        raise InputError(f"script {_quoted(path)} is no plain file here, so it is not run")
    return script


def why_not_run(order: Mapping[str, Any], named: Path | None, code: Mapping[str, str]) -> str:
    """Why this machine does not run the code that it has, by its digests; empty where it does."""
    if not code:
        return f"{_quoted(order['script'])} is not here"
    if named is None and (names := differing(order["code"], code)):
        return f"{', '.join(map(printable, names[:5]))} differs from the leader's; {NAME_IT}"
    return ""


def describe_command(script: Script) -> str:
    """What the leader has this machine run, with all arguments, on one line."""
    return printable(shlex.join([*script.words, *script.args]))


def _check_place(path: Path, whole: Path) -> None:
    below = Path.cwd().resolve()
    if ".." in path.parts or not whole.is_relative_to(below):
        raise InputError(
            f"script {_quoted(path)} is not below the folder in which uneven join was typed; type it in the folder of "
            f"the project, or {NAME_IT}"
        )
    inner = whole.relative_to(below)
    is_ours = whole.suffix == ".py" and is_users_code(str(whole)) and not any(p.startswith(".") for p in inner.parts)
    if not is_ours or _has_environment(whole, below):
        raise InputError(
            f"script {_quoted(path)} is no Python file of a project (.py, not in a hidden folder, an environment or an "
            f"installed package); {NAME_IT}"
        )


def _has_environment(whole: Path, below: Path) -> bool:
    """Whether a folder between the two is one of a Python. The project's own may be the top of its environment."""
    between: Sequence[Path] = [folder for folder in whole.parents if folder.is_relative_to(below) and folder != below]
    return any((folder / name).exists() for folder in between for name in ENVIRONMENTS)


def _quoted(path: Path | str) -> str:
    return f"'{printable(str(path))}'"
