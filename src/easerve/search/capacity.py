"""What one engine of a stage does alone, and a file that keeps what has been measured of it.

Rows are modelled (``search.modelled``) or measured on real engines (``easerve profile``); who reads
them sees no difference. The file is JSON lines, to which is only ever added: a run that is killed
leaves whole rows, and perhaps part of a line, which the next run removes.
"""

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from easerve.config import ConfigError
from easerve.types import Stage

BEGIN = b'{"key": "'
"""Of every line."""


class Cell(NamedTuple):
    """What is measured at once. ``tp``: devices of the engine; ``batch``: items of an encoder's
    call, prompts of a step, or sequences that decode at once.
    """

    stage: Stage
    tp: int
    batch: int

    def __str__(self) -> str:
        return f"{self.stage} on {self.tp}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Row:
    """``per_s``: requests per second of the engine, which has its devices to itself and work
    without end; infinite where a request asks nothing of the stage. ``seconds``: what a request
    waits for at this batch: the call of an encoder, its prefill, or a step of decode, from one
    token to the next. Raises ValueError for what cannot be.
    """

    stage: Stage
    tp: int
    batch: int
    per_s: float
    seconds: float

    def __post_init__(self) -> None:
        if self.tp < 1 or self.batch < 1:
            raise ValueError(f"{self.cell}: both are at least 1")
        if not self.per_s > 0:
            raise ValueError(f"{self.cell}: {self.per_s} requests per second cannot be")
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"{self.cell}: {self.seconds} seconds cannot be")

    @property
    def cell(self) -> Cell:
        return Cell(self.stage, self.tp, self.batch)


def row_to_json(row: Row) -> dict[str, Any]:
    """Strict JSON, which knows no infinity: null."""
    return asdict(row) | {"per_s": row.per_s if row.per_s < math.inf else None}


def row_from_json(content: Mapping[str, Any]) -> Row:
    """Raises KeyError, TypeError or ValueError for what is no row."""
    per_s = content["per_s"]
    return Row(
        Stage(content["stage"]),
        int(content["tp"]),
        int(content["batch"]),
        math.inf if per_s is None else float(per_s),
        float(content["seconds"]),
    )


@dataclass(frozen=True, slots=True)
class Key:
    """What rows hold for; of another key they say nothing.

    ``versions``: of all that makes a difference, as in ``easerve 0.5, vllm 0.32, bfloat16``.
    ``workload``: shapes of the requests.
    """

    device: str
    model: str
    versions: str
    workload: str

    @property
    def digest(self) -> str:
        return blake2b(json.dumps(asdict(self)).encode(), digest_size=8).hexdigest()


class Capacities(Protocol):
    """Of one engine of a stage."""

    def rows(self, stage: Stage, tp: int) -> Sequence[Row]:
        """By batch, rising; none where such an engine was not measured."""
        ...


@dataclass(frozen=True)
class Table:
    """Capacities as they were measured."""

    found: tuple[Row, ...]

    def rows(self, stage: Stage, tp: int) -> Sequence[Row]:
        found = (row for row in self.found if row.stage is stage and row.tp == tp)
        return sorted(found, key=lambda row: row.batch)

    def to_json(self) -> list[dict[str, Any]]:
        return [row_to_json(row) for row in self.found]

    @classmethod
    def from_json(cls, content: Iterable[Mapping[str, Any]]) -> "Table":
        return cls(tuple(map(row_from_json, content)))


def best(rows: Iterable[Row], max_s: float = math.inf, max_batch: int | None = None) -> Row | None:
    """The row of most requests per second with which no request waits longer than ``max_s``, the
    smallest batch of those that do as much; None where there is no such row.
    """
    kept = [
        row
        for row in rows
        if row.seconds <= max_s and (max_batch is None or row.batch <= max_batch)
    ]
    return max(kept, key=lambda row: (row.per_s, -row.batch), default=None)


def most_per_s(rows: Sequence[Row], max_s: float, max_batch: int | None = None) -> float:
    """As ``best``, but requests per second, straight between the rows (rising) next to what is
    allowed: batches between them can be had. 0 where there is none.
    """
    found = best(rows, max_s, max_batch)
    most = 0.0 if found is None else found.per_s
    for low, high in pairwise(rows):
        part = 1.0
        if max_batch is not None:
            part = min(part, (max_batch - low.batch) / (high.batch - low.batch))
        if high.seconds > max_s:
            part = min(part, (max_s - low.seconds) / (high.seconds - low.seconds))
        if low.seconds <= max_s and part >= 0 and math.isfinite(high.per_s - low.per_s):
            most = max(most, low.per_s + part * (high.per_s - low.per_s))
    return most


def kept(
    path: Path,
    key: Key,
    cells: Sequence[Cell],
    make: Callable[[Sequence[Cell]], Iterable[Row]],
    tick: Callable[[str], None] = lambda text: None,
    fresh: bool = False,
) -> tuple[Row, ...]:
    """The rows of these cells, in their order: those of the file, and what ``make`` measures.

    ``make`` gets the cells that are missing and gives rows one by one, each of which is in the file
    before the next is asked for; a cell that it gives no row for stays missing, and is asked for
    again the next time. ``fresh``: nothing of the file is used. ``tick`` is told of the progress.
    Raises ConfigError as ``opened``.
    """
    with opened(path, key, fresh) as store:
        known = store.rows
        missing = [cell for cell in cells if cell not in known]
        if num := len(cells) - len(missing):
            tick(f"{num} of {len(cells)} capacities are in {path}")
        for number, row in enumerate(make(missing) if missing else (), 1):
            store.add(row)
            tick(f"{row.cell}: {row.per_s:.3g} requests/s ({number} of {len(missing)})")
        return tuple(store.rows[cell] for cell in cells if cell in store.rows)


class Store:
    """The rows of one key in a file; see ``opened``."""

    def __init__(self, file: BinaryIO, key: Key, rows: dict[Cell, Row], is_new: bool) -> None:
        self._file, self._key, self._rows = file, key, rows
        if is_new:  # for people, and so that no row of an earlier time counts
            self._write({"key": key.digest, "of": asdict(key)})

    @property
    def rows(self) -> Mapping[Cell, Row]:
        return self._rows

    def add(self, row: Row) -> None:
        """On the disk when this returns. A later row of a cell takes an earlier one's place."""
        self._write({"key": self._key.digest, **row_to_json(row)})
        self._rows[row.cell] = row

    def _write(self, content: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(content, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def opened(path: Path, key: Key, fresh: bool = False) -> Iterator[Store]:
    """The file is made, with its folder. ``fresh``: forget the rows of this key.

    Raises ConfigError, with the path, for a file that cannot be used, whose lines are something
    else, or that another process writes.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path}: another process measures into it") from None
        rows = _read(path, file, key)
        yield Store(file, key, {} if fresh or rows is None else rows, fresh or rows is None)


def _read(path: Path, file: BinaryIO, key: Key) -> dict[Cell, Row] | None:
    """Rows of this key; None where it is new. What was written of a last line is cut off."""
    file.seek(0)
    lines = file.read().split(b"\n")
    torn = lines.pop()
    rows: dict[Cell, Row] | None = None
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
            if content["key"] != key.digest:
                continue
            if "of" in content:
                rows = {}
            elif rows is not None:
                row = row_from_json(content)
                rows[row.cell] = row
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path}: line {number} is no row of a capacity") from None
    if torn:
        if torn[: len(BEGIN)] != BEGIN[: len(torn)]:  # nothing of ours, so left as it is
            raise ConfigError(f"{path}: line {len(lines) + 1} is no row of a capacity")
        file.truncate(file.tell() - len(torn))
    return rows
