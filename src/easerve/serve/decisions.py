"""The decision log: what the core was told, when, and what it decided; replayed, it decides again.

JSON lines: a header with what the core was made of, then one line for each step. In it are times,
ids of requests and engines, sizes in bytes and tokens, keys of pictures (hashes of their pixels)
and the decisions with their reasons. Not in it: prompts, pictures, answers, sampling parameters,
API keys, addresses of clients. Only its owner may read it. It grows until the server ends.

The log must not cost a request: lines are gathered and written once a second, so that a server that
is killed loses the last of them; and whatever goes wrong with it ends the log, not the server.
"""

import contextlib
import fcntl
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, get_args

import msgspec

from easerve import __version__
from easerve.config import ConfigError
from easerve.costs.linear import LinearCosts
from easerve.policy.admission import Admission
from easerve.policy.core import Core, Limits
from easerve.policy.events import Action, Event, StartEncode
from easerve.policy.knobs import Knobs
from easerve.policy.partition import Devices
from easerve.types import NS_PER_S

FORMAT = 4
BEGIN = b'{"kind":"header",'
BUFFER_BYTES = 64 << 10
EVENTS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
ACTIONS: Mapping[str, type[Action]] = {kind.__name__: kind for kind in get_args(Action)}
T = TypeVar("T")
logger = logging.getLogger("easerve.decisions")


class StepLog(Protocol):
    """What a driver tells of each step of its core."""

    def step(self, now_ns: int, events: Sequence[Event], actions: Sequence[Action]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class DecisionLogError(Exception):
    """Not a decision log that this version can read; the text names file and line."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the core was made of, and which version wrote it down."""

    easerve: str = field(default=__version__, kw_only=True)
    format: int = field(default=FORMAT, kw_only=True)
    knobs: Knobs
    admission: Admission
    limits: Limits
    costs: LinearCosts
    devices: Devices | None = None

    def make_core(self) -> Core:
        return Core(self.knobs, self.admission, self.costs, self.limits, self.devices)


# Writing ----------------------------------------------------------------------------------------


class DecisionLog:
    """Writes a new log. One that ``path`` holds already becomes ``path``.1; an older .1 is lost.

    Raises ConfigError where it cannot be written, and for a file that is something else.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._path, self._flushed_ns = path, 0
        self._file: BinaryIO | None = None
        try:
            self._file = _open(path)
            self._file.write(_line({"kind": "header"} | _plain(header)))
            self._file.flush()
        except OSError as error:
            self._abandon()
            locked = isinstance(error, BlockingIOError)
            reason = "another server writes it" if locked else error.strerror
            raise ConfigError(f"decision log {path}: {reason}") from None

    def step(self, now_ns: int, events: Sequence[Event], actions: Sequence[Action]) -> None:
        """Log one step. Raises nothing."""
        if self._file is None:
            return
        try:
            self._file.write(_step_line(now_ns, events, actions))
            if now_ns - self._flushed_ns >= NS_PER_S:
                self._file.flush()
                self._flushed_ns = now_ns
        except Exception as error:  # whatever it is, serving goes on
            self._report(error)
            self._abandon()

    def flush(self) -> None:
        """Write what was gathered, while no steps come. Raises nothing."""
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._report(error)
            self._abandon()

    def close(self) -> None:
        """Write what is left. Later steps are not logged."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._report(error)

    def _abandon(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _report(self, error: Exception) -> None:
        logger.error("decision log %s: %s; it ends here, serving goes on", self._path, error)


def _open(path: Path) -> BinaryIO:
    """Empty, and locked: two servers would spoil each other's."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
    with contextlib.ExitStack() as unless_kept:
        file = os.fdopen(os.open(path, flags, 0o600), "ab", BUFFER_BYTES)
        unless_kept.enter_context(file)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begin = os.pread(file.fileno(), BUFFER_BYTES, 0)
        if not BEGIN.startswith(begin[: len(BEGIN)]):
            raise ConfigError(f"decision log {path}: the file exists and is not a decision log")
        if begin.count(b"\n") < 2:  # no step: a server that did not come up
            os.ftruncate(file.fileno(), 0)
            os.fchmod(file.fileno(), 0o600)
            unless_kept.pop_all()
            return file
        older = path.with_name(f"{path.name}.1")
        path.replace(older)
        logger.warning("decision log %s: the one that was there is now %s", path, older)
    return _open(path)


def _step_line(now_ns: int, events: Iterable[Event], actions: Iterable[Action]) -> bytes:
    step: dict[str, Any] = {"kind": "step", "now_ns": now_ns}
    if told := [_tagged("event", event) for event in events]:
        step["events"] = told
    if decided := [_tagged("action", action) for action in actions]:
        step["actions"] = decided
    return _line(step)


def _line(content: dict[str, Any]) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def _tagged(tag: str, value: Event | Action) -> dict[str, Any]:
    return {tag: type(value).__name__} | _plain(value)


def _plain(value: object) -> dict[str, Any]:
    fields: dict[str, Any] = _finite(msgspec.to_builtins(value))
    return fields


def _finite(value: Any) -> Any:
    """JSON knows neither inf nor nan: they become strings, which reading takes for floats."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# Reading ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the core; it stands in line ``line`` of the file."""

    line: int
    now_ns: int
    events: tuple[Event, ...]
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class _StepLine:
    now_ns: int
    events: list[dict[str, Any]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)


class Reading:
    """The header of a log and, iterated over once, its steps.

    A last line without its end is left out, and ``truncated`` set: the server was killed. Every
    other line that is not understood is a DecisionLogError.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.truncated = path, False
        self._lines = self._read()
        number, line = next(self._lines, (1, b""))
        with self._located(number):
            raw = msgspec.json.decode(line)
            if not isinstance(raw, dict) or raw.get("format") != FORMAT:
                raise ValueError(f"not the header of a decision log of format {FORMAT}")
            self.header = _value(raw, "kind", {"header": Header})

    def __iter__(self) -> Iterator[Step]:
        for number, line in self._lines:
            with self._located(number):
                step = _value(msgspec.json.decode(line), "kind", {"step": _StepLine})
                events = tuple(_value(each, "event", EVENTS) for each in step.events)
                actions = tuple(_value(each, "action", ACTIONS) for each in step.actions)
            yield Step(number, step.now_ns, events, actions)

    def _read(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        self.truncated = True
                        return
                    yield number, line
        except OSError as error:
            raise DecisionLogError(f"{self._path}: {error.strerror}") from None

    @contextlib.contextmanager
    def _located(self, number: int) -> Iterator[None]:
        try:
            yield
        except (msgspec.MsgspecError, ValueError) as error:
            raise DecisionLogError(f"{self._path}:{number}: {error}") from None


def read(path: Path) -> Reading:
    """Open a log. Raises DecisionLogError."""
    return Reading(path)


def _value(raw: Any, tag: str, kinds: Mapping[str, type[T]]) -> T:
    """What ``raw`` describes. Raises ValueError for what this version does not know."""
    name = raw.get(tag) if isinstance(raw, dict) else None
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"unknown {tag} {name!r}: written by another version?")
    fields = {key: each for key, each in raw.items() if key != tag}
    value = msgspec.convert(fields, kinds[name], strict=False)
    if unknown := _unknown(fields, msgspec.to_builtins(value)):
        raise ValueError(f"unknown field {unknown!r} of {name}: written by another version?")
    return value


def _unknown(given: Any, known: Any) -> str | None:
    """A key in ``given`` that is not in what was made of it."""
    if isinstance(given, list):
        return next(filter(None, map(_unknown, given, known)), None)
    if not isinstance(given, dict):
        return None
    deeper = (
        key if key not in known else _unknown(each, known[key]) for key, each in given.items()
    )
    return next(filter(None, deeper), None)


# Replaying --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """``expected``: the actions of the log; ``got``: those of the replay, or the core's error."""

    step: int
    line: int
    now_ns: int
    expected: list[dict[str, Any]]
    got: list[dict[str, Any]] | str


@dataclass(slots=True)
class Batches:
    """Encoder calls that were closed for one reason; items and waits are sums over them."""

    count: int = 0
    num_items: int = 0
    wait_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What a log holds, and the first step at which this version's core decides otherwise."""

    header: Header
    num_steps: int = 0
    num_events: int = 0
    num_actions: int = 0
    batches: dict[str, Batches] = field(default_factory=dict)
    truncated: bool = False
    difference: Difference | None = None

    @property
    def num_batches(self) -> int:
        return sum(batches.count for batches in self.batches.values())

    def count(self, step: Step) -> None:
        self.num_steps += 1
        self.num_events += len(step.events)
        self.num_actions += len(step.actions)
        for action in step.actions:
            if isinstance(action, StartEncode):
                batches = self.batches.setdefault(action.decision.reason, Batches())
                batches.count += 1
                batches.num_items += len(action.items)
                batches.wait_s += action.decision.wait_s


def replay(path: Path) -> Outcome:
    """Let a new core decide again. Raises DecisionLogError. After a difference it only counts."""
    reading = read(path)
    outcome = Outcome(reading.header)
    try:
        core = reading.header.make_core()
    except Exception as error:
        raise DecisionLogError(f"{path}:1: makes no core: {error!r}") from error
    for step in reading:
        outcome.count(step)
        if outcome.difference is None:
            outcome.difference = _compare(core, step, outcome.num_steps)
    outcome.truncated = reading.truncated
    return outcome


def _compare(core: Core, step: Step, number: int) -> Difference | None:
    expected = [_tagged("action", action) for action in step.actions]
    got: list[dict[str, Any]] | str
    try:
        got = [_tagged("action", action) for action in core.step(step.events, step.now_ns)]
    except Exception as error:  # perhaps the very bug that the log is replayed for
        got = f"{type(error).__name__}: {error}"
    return None if got == expected else Difference(number, step.line, step.now_ns, expected, got)
