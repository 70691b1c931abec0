"""How far interpolation is from what was measured: points are left out and found again.

Every point between others is left out in turn, with all that was measured at it, and is found from
its neighbours. These are twice as far away as they are in use, where points are also seldom right
in the middle: in use, errors are smaller.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from easerve.costs.hardware import Hardware
from easerve.costs.kernels import (
    Curve,
    Plane,
    Points,
    Products,
    Shape,
    Table,
    all_pairs,
    all_reduce,
    attention_points,
    causal_pairs,
    cold_points,
    encoder_points,
    table,
)

SMALLEST = 1024  # sides of matrices; those of a large model are no smaller
FEW_ROWS = 256
HEAD_DIM, HEADS_PER_KV, ENCODER_HEAD_DIM = 128, 8, 64
Pair = tuple[float, float]  # measured, found


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative ones of ``num`` points; ``bias``: their mean, with sign."""

    kernel: str
    left_out: str
    num: int
    median: float
    p95: float
    bias: float


def held_out(hardware: Hardware) -> list[Errors]:
    """Of all tables of a device; raises ValueError if there are none."""
    device = hardware.kernels.table if hardware.kernels else ""
    gemm, context = table(device, "gemm"), table(device, "context")
    generation, reduced = table(device, "generation"), table(device, "allreduce")
    if gemm is None or context is None or generation is None or reduced is None:
        raise ValueError(f"{hardware.title}: no measured kernels")
    prompts = attention_points(context, HEAD_DIM, HEADS_PER_KV, by_kv=False)
    decodes = cold_points(generation, HEAD_DIM, HEADS_PER_KV, hardware.cache.si)
    found = [
        *_products(gemm),
        _errors("attention of a prompt", "length", _lengths(prompts, causal_pairs)),
        _errors("attention of a prompt", "heads", _heads(prompts)),
        _errors("attention of decodes", "context", _lengths(decodes, float)),
        _errors("attention of decodes", "heads", _heads(decodes)),
        _errors("all-reduce", "bytes", _sizes(reduced)),
    ]
    encoder = table(device, "encoder")
    if encoder is not None:
        points = encoder_points(encoder, ENCODER_HEAD_DIM)
        found.append(_errors("attention of an encoder", "length", _lengths(points, all_pairs)))
        found.append(_errors("attention of an encoder", "heads", _heads(points)))
    return found


def _products(gemm: Table) -> Iterator[Errors]:
    products = Products(gemm)
    sides = [x for x in products.outputs if x >= SMALLEST]
    shapes = ((inputs, outputs) for inputs in sides for outputs in sides)
    curves = {shape: curve for shape in shapes if (curve := products.measured(shape))}
    ways = {
        "rows": [point for curve in curves.values() for point in _points(dict(curve.points()))],
        "columns": list(_shapes(curves, sides, by_inputs=False)),
        "inputs": list(_shapes(curves, sides, by_inputs=True)),
    }
    for name, points in ways.items():
        few = ((measured, found) for rows, measured, found in points if rows <= FEW_ROWS)
        many = ((measured, found) for rows, measured, found in points if rows > FEW_ROWS)
        yield _errors(f"product, up to {FEW_ROWS} rows", name, few)
        yield _errors(f"product, more than {FEW_ROWS} rows", name, many)


def _shapes(
    curves: Mapping[Shape, Curve], sides: list[int], *, by_inputs: bool
) -> Iterator[tuple[float, float, float]]:
    """(rows, measured, found) of a matrix between two that differ from it on one side only."""
    for before, at, after in zip(sides, sides[1:], sides[2:], strict=False):
        part = (at - before) / (after - before)
        for side in sides:
            shapes = ((x, side) if by_inputs else (side, x) for x in (before, at, after))
            low, curve, high = (curves.get(shape) for shape in shapes)
            if low and curve and high:
                for x, y in curve.points():
                    yield x, y, low(x) * (1 - part) + high(x) * part


def _points(measured: Mapping[float, float]) -> Iterator[tuple[float, float, float]]:
    """(x, measured, found) of each point of a curve between others."""
    for x in sorted(measured)[1:-1]:
        others = Curve((other, y) for other, y in measured.items() if other != x)
        yield x, measured[x], others(x)


def _lengths(points: Points, work: Callable[[float], float]) -> Iterator[Pair]:
    for length in sorted(points)[1:-1]:
        others = Plane({x: row for x, row in points.items() if x != length}, work)
        for heads, seconds in points[length].items():
            yield seconds, others(heads, length)


def _heads(points: Points) -> Iterator[Pair]:
    for row in points.values():
        yield from ((y, found) for _, y, found in _points({float(x): y for x, y in row.items()}))


def _sizes(reduced: Table) -> Iterator[Pair]:
    for num_devices in (2, 4, 8):
        for custom in (False, True):
            curve = all_reduce(reduced, num_devices, custom)
            if curve is not None:
                points = _points(dict(curve.points()))
                yield from ((seconds, found) for _, seconds, found in points)


def _errors(kernel: str, left_out: str, pairs: Iterable[Pair]) -> Errors:
    signed = [found / measured - 1 for measured, found in pairs]
    sizes = sorted(map(abs, signed))
    p95 = sizes[int(0.95 * (len(sizes) - 1))]
    return Errors(kernel, left_out, len(sizes), median(sizes), p95, fmean(signed))
