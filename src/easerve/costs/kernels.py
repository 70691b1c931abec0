"""Measured kernels: tables of latencies, and what lies between their points.

A table is a file of ``kernels/``, which says where it is from; ``scripts/kernel_tables.py`` writes
them. All times here are in seconds. Between points a time is linear in the work: in the rows of a
product, in the sides of its matrix, in the pairs of tokens of attention, in heads, in bytes.
Beyond the last point it grows with the work, at the throughput of that point.

Attention is by heads and length: n sequences of h heads take as long as one of n h heads, so that
one plane holds all batches. Of a decode it is the heads of the KV cache that count, since they
are what is read.
"""

import gzip
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import median

FOLDER = Path(__file__).parent / "kernels"
Key = tuple[str, ...]
Shape = tuple[int, int]  # (inputs, outputs) of a matrix
Points = Mapping[int, Mapping[int, float]]  # seconds by length and by heads of all sequences
MICRO = 1e-6
ALIKE = 1.6  # query heads of a KV head: tables of so much more or less are taken together
VALUE_BYTES = 2  # all tables are of bfloat16
CUSTOM_BYTES = 8 << 20  # vLLM's own all-reduce takes smaller messages only (custom_all_reduce.py)


class Curve:
    """Piecewise linear in x: constant before the first point, in proportion to x after the last."""

    __slots__ = ("_slopes", "xs", "ys")

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        """Raises ValueError if there are no points, or none with an x above 0."""
        ordered = sorted(points)
        self.xs = [x for x, _ in ordered]
        self.ys = [y for _, y in ordered]
        if not ordered or self.xs[-1] <= 0:
            raise ValueError("a curve needs a point above 0")
        self._slopes = _slopes(self.xs, self.ys)

    def points(self) -> Iterator[tuple[float, float]]:
        return zip(self.xs, self.ys, strict=True)

    def __call__(self, x: float) -> float:
        at = bisect_right(self.xs, x) - 1
        if at < 0:
            return self.ys[0]
        return self.ys[at] + (x - self.xs[at]) * self._slopes[at]


def _slopes(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """Of each point to the next one; of the last one in proportion."""
    steps = zip(pairwise(xs), pairwise(ys), strict=True)
    between = [(y2 - y1) / (x2 - x1) for (x1, x2), (y1, y2) in steps]
    return [*between, ys[-1] / xs[-1]]


def total(curves: Sequence[tuple[float, Curve]]) -> Curve:
    """The sum of curves, each so many times."""
    xs = sorted({x for _, curve in curves for x in curve.xs})
    return Curve((x, sum(times * curve(x) for times, curve in curves)) for x in xs)


class Plane:
    """A time by heads and length; between lengths it is linear in ``work`` of one head."""

    __slots__ = ("_heads", "_lengths", "_slopes", "_spans", "_times", "_work", "_works")

    def __init__(self, points: Points, work: Callable[[float], float]) -> None:
        curves = {length: Curve(row.items()) for length, row in sorted(points.items())}
        self._lengths = list(curves)
        self._heads = sorted({x for curve in curves.values() for x in curve.xs})
        self._times = [[curve(x) for x in self._heads] for curve in curves.values()]
        self._slopes = [_slopes(self._heads, times) for times in self._times]
        self._work = work
        self._works = [work(length) for length in self._lengths]
        self._spans = [high - low for low, high in pairwise(self._works)]

    def __call__(self, heads: float, length: float) -> float:
        row = max(bisect_right(self._lengths, length) - 1, 0)
        column = bisect_right(self._heads, heads) - 1
        beyond = 0.0
        if column < 0:
            column = 0
        else:
            beyond = heads - self._heads[column]
        low = self._times[row][column] + beyond * self._slopes[row][column]
        work = self._work(length) - self._works[row]
        if work <= 0:
            return low
        if row == len(self._spans):
            return low * (1 + work / self._works[row])
        high = self._times[row + 1][column] + beyond * self._slopes[row + 1][column]
        return low + (high - low) * work / self._spans[row]


class Table:
    """A file of measured times: a row for each key, a column for each point of a grid."""

    def __init__(self, path: Path) -> None:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        self.head = [line[2:] for line in lines if line.startswith("#")]
        names, *rows = lines[len(self.head) :]
        self.keys = next(line for line in self.head if line.startswith("keys: "))[6:].split(",")
        self.grid = [int(x) for x in names.split(",")[len(self.keys) :]]
        split = (row.split(",", len(self.keys)) for row in rows)
        self._rows = {tuple(key): cells for *key, cells in split}

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def row(self, key: Key) -> dict[int, float]:
        """Seconds by grid; points that were not measured are not there."""
        cells = zip(self.grid, self._rows[key].split(","), strict=True)
        return {at: float(cell) * MICRO for at, cell in cells if cell}


@cache
def table(device: str, kind: str) -> Table | None:
    """None: this kind of kernel was not measured on that device."""
    path = FOLDER / f"{device}-{kind}.csv.gz"
    return Table(path) if path.is_file() else None


class Products:
    """m rows times a matrix, by m; ``table`` has a curve for each of many shapes of matrices."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.outputs = sorted({int(outputs) for outputs, _ in table})
        self.inputs = sorted({int(inputs) for _, inputs in table})

    def measured(self, shape: Shape) -> Curve | None:
        key = (str(shape[1]), str(shape[0]))
        return Curve(self._table.row(key).items()) if key in self._table else None

    def curve(self, shape: Shape) -> Curve:
        """Bilinear between the four nearest shapes; of a larger one than all, in proportion."""
        inputs = _between(self.inputs, shape[0])
        outputs = _between(self.outputs, shape[1])
        corners = ((x * y, self.measured((k, n))) for x, k in inputs for y, n in outputs)
        known = [(weight, curve) for weight, curve in corners if curve is not None]
        wanted = sum(x * y for x, _ in inputs for y, _ in outputs)
        if not known:  # the largest of all were too large for the device that was measured
            smaller = self.inputs[-2]
            return total([(shape[0] / smaller, self.curve((smaller, shape[1])))])
        scale = wanted / sum(weight for weight, _ in known)
        return total([(scale * weight, curve) for weight, curve in known])


def least_per_x(curve: Curve) -> float:
    """Of one x, at the point where it takes the least."""
    return min(y / x for x, y in curve.points())


def causal(table: Table, head_dim: int, heads_per_kv: float) -> Plane | None:
    """Attention of whole prompts; None: no such heads were measured."""
    points = attention_points(table, head_dim, heads_per_kv, by_kv=False)
    return Plane(points, causal_pairs) if points else None


def generation(
    table: Table, head_dim: int, heads_per_kv: float, cache_bytes: float, scale: float = 1.0
) -> Plane | None:
    """Attention of one token for each sequence, by heads of the KV cache and by context.

    ``scale``: on all times. None: no such heads were measured with KV caches of that size.
    """
    points = cold_points(table, head_dim, heads_per_kv, cache_bytes)
    scaled = {
        context: {heads: scale * time for heads, time in row.items()}
        for context, row in points.items()
    }
    return Plane(scaled, float) if scaled else None


def cold_points(table: Table, head_dim: int, heads_per_kv: float, cache_bytes: float) -> Points:
    """Seconds of decodes, by context and by heads, with a KV cache that is in memory.

    The table was measured with one KV cache over and over: one smaller than ``cache_bytes`` stayed
    in the device's cache. In a model other layers come between, so no time is less than that of
    its bytes at the rate of those that are twice as large or more, in the median.
    """
    points = attention_points(table, head_dim, heads_per_kv, by_kv=True)
    token = 2 * head_dim * VALUE_BYTES
    rates = [
        heads * context * token / time
        for context, row in points.items()
        for heads, time in row.items()
        if heads * context * token > 2 * cache_bytes
    ]
    if not rates:
        return {}
    rate = median(rates)
    return {
        context: {heads: max(time, heads * context * token / rate) for heads, time in row.items()}
        for context, row in points.items()
    }


def unmasked(table: Table, head_dim: int) -> Plane | None:
    """Attention of an encoder; None: heads of that size were not measured."""
    points = encoder_points(table, head_dim)
    return Plane(points, all_pairs) if points else None


def all_reduce(table: Table, num_devices: int, custom: bool) -> Curve | None:
    """By the bytes of a message. ``custom``: vLLM's own takes those that are small enough.

    None: not measured between so many devices. Of vLLM's own, the times in a CUDA graph are taken:
    the others have the time that the host takes to launch it, which passes while a device is busy.
    """
    nccl, own = ("nccl", str(num_devices)), ("custom-graph", str(num_devices))
    if nccl not in table:
        return None
    points = table.row(nccl)
    if custom:
        small = {at: time for at, time in table.row(own).items() if at < CUSTOM_BYTES}
        points = small | {at: time for at, time in points.items() if at >= CUSTOM_BYTES}
    return Curve(points.items())


def causal_pairs(length: float) -> float:
    """A token and one that it attends to, over a whole prompt."""
    return length * (length + 1) / 2


def all_pairs(length: float) -> float:
    """A token and any one of its sequence."""
    return length * length


def encoder_points(table: Table, head_dim: int) -> Points:
    """Seconds by length and by heads of all sequences, the median of all that have these."""
    return _medians(
        (heads * batch, table.row(key))
        for key, (dim, heads, batch) in _numbers(table)
        if dim == head_dim
    )


def attention_points(table: Table, head_dim: int, heads_per_kv: float, *, by_kv: bool) -> Points:
    """Seconds by length and by heads of all sequences, the median of all that have these.

    Of more or fewer query heads for a KV head, those nearby are taken, or else the nearest; all of
    them for fewer heads than these have. ``by_kv``: by heads of the KV cache.
    """
    shapes = [(key, shape) for key, shape in _numbers(table) if shape[0] == head_dim]
    if not shapes:
        return {}
    far = {key: abs(log(heads / kv / heads_per_kv)) for key, (_, heads, kv, _) in shapes}
    nearest = max(min(far.values()), log(ALIKE))
    counted = {key: (kv if by_kv else heads) * batch for key, (_, heads, kv, batch) in shapes}
    fewest = min(heads for key, heads in counted.items() if far[key] <= nearest)
    return _medians(
        (heads, table.row(key))
        for key, heads in counted.items()
        if far[key] <= nearest or heads < fewest
    )


def _numbers(table: Table) -> Iterator[tuple[Key, tuple[int, ...]]]:
    return ((key, tuple(map(int, key))) for key in table)


def _medians(rows: Iterable[tuple[int, Mapping[int, float]]]) -> Points:
    samples: dict[int, dict[int, list[float]]] = {}
    for heads, row in rows:
        for at, time in row.items():
            samples.setdefault(at, {}).setdefault(heads, []).append(time)
    return {
        at: {heads: median(times) for heads, times in row.items()} for at, row in samples.items()
    }


def _between(grid: Sequence[int], x: int) -> list[tuple[float, int]]:
    """Weights of the two points around x; of the last one alone, more than 1 if x is beyond."""
    at = bisect_right(grid, x) - 1
    if at < 0:
        return [(1, grid[0])]
    if grid[at] == x or at + 1 == len(grid):
        return [(x / grid[at], grid[at])]
    part = (x - grid[at]) / (grid[at + 1] - grid[at])
    return [(1 - part, grid[at]), (part, grid[at + 1])]
