"""What the measured stages allow: ``easerve bench cpu`` explains its ratios by it.

EAServe's stages run beside each other, and what they compete for is cores: it answers as many
requests as their CPU time lets it, unless one process is busy all the time before. What a request
should cost is put together from what the stages cost alone (``cpu_alone``), in portions as in the
run: its pictures are read, decoded and rendered, then encoded in calls of so many; and it costs
what a text of as many tokens costs behind its rendering, with so many steps of prefill and of
decode and an answer in so many chunks, and what pictures add to a prefill. What is taken from the
run is the portions, never what it cost.

An engine that does everything does one thing after the other, so that the times of its stages add
up: a picture's is what it adds to an answer of one token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from easerve.cli.bench.cpu_alone import CALLS, SHORT, Alone, Measured
from easerve.cli.bench.cpu_runs import Aggregated, Easerve, Shape
from easerve.cli.bench.cpu_stages import Costs, added, only, times, without
from easerve.types import Stage

PREFILLING = ("prefill", "prefill core")
TALKING = ("router", "decode", "client")
"""What they do for a token depends on how many come at a time, too: on steps and chunks."""


@dataclass(frozen=True, slots=True)
class Portions:
    """Of a run: calls to the encoder for a picture; for a request steps by stage, chunks of its
    answer, tokens of its prompt. Calls that wait at an encoder share a step."""

    calls: float
    steps: Mapping[str, float]
    chunks: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Allowed:
    """Of a system: CPU seconds that a request should cost, by process, requests/s, and the cores
    that are busy then."""

    costs: Costs
    cores: float
    most_per_s: float


def by_easerve(alone: Alone, system: Easerve, shape: Shape, portions: Portions) -> Allowed:
    prepared = only(alone.preparation(system, shape), "router", "preparation", "encode")
    rendered = only(alone.rendering(system, portions.prompt_tokens), "router", "prefill")
    costs = added(
        prepared,
        times(_encoded(alone, system, shape, portions), shape.num_images),
        without(_text(alone, system, shape, portions), rendered),
        only(alone.pictures_in_prefill(system, shape), *PREFILLING),
    )
    cores = alone.cores()
    return Allowed(costs, cores, most_per_s(costs, cores, system.num_engines))


def _encoded(alone: Alone, system: Easerve, shape: Shape, portions: Portions) -> Costs:
    """Servers go by calls, cores by steps, and by calls that share one."""
    batches, crowd = alone.encoding(system), alone.encoding_in_a_crowd(system, shape)
    steps = portions.steps[Stage.ENCODE] / shape.num_images
    in_crowd = crowd.portions[Stage.ENCODE]
    served = along(
        [*(each for each in batches if each.portions[CALLS] < 1), crowd], CALLS, portions.calls
    )
    core = "encode core"
    made, shared = (along(batches, Stage.ENCODE, each) for each in (steps, in_crowd))
    sharing_s = max(0.0, crowd.cost[core] - shared[core]) / (1 - in_crowd) if in_crowd < 1 else 0.0
    return {
        **only(served, "router", "encode"),
        **only(made, "prefill core"),
        core: made[core] + sharing_s * max(0.0, portions.calls - steps),
    }


def _text(alone: Alone, system: Easerve, shape: Shape, portions: Portions) -> Costs:
    tokens = portions.prompt_tokens
    many, few = (alone.text(system, tokens, shape.num_tokens, fewer) for fewer in (False, True))
    short, steps = alone.text(system, tokens, SHORT), portions.steps
    prefilled = along([many, few], Stage.PREFILL, steps[Stage.PREFILL])
    decoded = along([many, few], Stage.DECODE, steps[Stage.DECODE])
    where = steps[Stage.DECODE], portions.chunks
    return {
        **only(prefilled, *PREFILLING),
        **only(decoded, "decode core"),
        **{name: on_plane([many, few, short], name, *where) for name in TALKING},
    }


def by_plain(alone: Alone, system: Aggregated, shape: Shape, tokens: int) -> Allowed:
    text, first = (alone.text(system, tokens, each) for each in (shape.num_tokens, 1))
    pictures = alone.pictures(system, shape)
    costs = added(text.cost, without(pictures.cost, first.cost))
    wall_s = text.wall_s + max(0.0, pictures.wall_s - first.wall_s)
    return Allowed(costs, sum(costs.values()) / wall_s, 1 / wall_s)


def along(points: Sequence[Measured], stage: str, portion: float) -> Costs:
    """On the line through the points, process by process."""
    found: Costs = {}
    for process in dict.fromkeys(name for point in points for name in point.cost):
        line = sorted((each.portions[stage], each.cost.get(process, 0.0)) for each in points)
        found[process] = between(line, portion)
    return found


def between(line: Sequence[tuple[float, float]], x: float) -> float:
    """The value at ``x`` of the line through some points, rising in x.

    Beyond them it goes on as it goes on the whole: a step has a price, and so has the rest.
    """
    (first_x, first_y), (last_x, last_y) = line[0], line[-1]
    if first_x <= x <= last_x:
        for (x0, y0), (x1, y1) in pairwise(line):
            if x <= x1:
                return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    slope = (last_y - first_y) / (last_x - first_x) if last_x > first_x else 0.0
    end_x, end_y = (first_x, first_y) if x < first_x else (last_x, last_y)
    return max(0.0, end_y + slope * (x - end_x))


def on_plane(points: Sequence[Measured], process: str, steps: float, chunks: float) -> float:
    """What a process costs by steps of decode and by chunks, from three points.

    Where they are on one line it is the first one's cost.
    """
    x, y, z = zip(
        *((each.portions[Stage.DECODE], each.chunks, each.cost[process]) for each in points),
        strict=True,
    )
    x1, x2, y1, y2, z1, z2 = (row[at] - row[0] for row in (x, y, z) for at in (1, 2))
    across = x1 * y2 - x2 * y1
    if not across:
        return float(z[0])
    by_step, by_chunk = (z1 * y2 - z2 * y1) / across, (x1 * z2 - x2 * z1) / across
    return max(0.0, float(z[0] + by_step * (steps - x[0]) + by_chunk * (chunks - y[0])))


def most_per_s(costs: Costs, num_cores: float, num_engines: Mapping[str, float]) -> float:
    """Requests that so much CPU time lets through: all cores are busy, or one process is.

    A process does nearly all in one thread. ``num_engines``: how many share a stage's work, where
    it is not one.
    """
    slowest_s = max(
        each / num_engines.get(name.removesuffix(" core"), 1.0) for name, each in costs.items()
    )
    return min(num_cores / sum(costs.values()), 1 / slowest_s)
