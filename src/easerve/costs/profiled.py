"""Costs and the host's work from a profile: measured points, and straight lines between them.

Beyond the last point a line goes on with the slope that it had there. What was not measured is
assumed: that time is in proportion to embeddings where items are of another size than the
profile's, and to the inverse of the share where the language model runs on part of its device.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from easerve.config import ConfigError
from easerve.costs import profile as profiles
from easerve.costs.base import Costs, Forward, Media
from easerve.costs.profile import P50, Profile, percentile
from easerve.costs.stages import Load, Stages

Point = tuple[float, float]
OLDER = "stages: measured by an older easerve profile; run it again"


class Line:
    """Through points, whose x differ; never below 0. A single point is a constant."""

    def __init__(self, points: Iterable[Point]) -> None:
        self._points = sorted(points)
        if not self._points:
            raise ValueError("a line needs a point")

    def __call__(self, x: float) -> float:
        points = self._points
        if len(points) == 1:
            return points[0][1]
        right = min(max(bisect_left(points, (x, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        slope = (y1 - y0) / (x1 - x0)
        if x > x1:  # noise at the end must not make more work cheaper
            slope = max(0.0, slope)
            return y1 + slope * (x - x1)
        return max(0.0, y0 + slope * (x - x0))


class ProfileCosts(Costs):
    """``surface``: by how much a forward of the encoder takes longer on part of its device than on
    all of it, by items and share; None: as its inverse.
    """

    def __init__(
        self,
        stages: Stages,
        item_tokens: int,
        surface: Callable[[float, float], float] | None = None,
    ) -> None:
        self._item_tokens = item_tokens
        self._surface = surface or _inverse
        self._encode = Line((each.batch, each.engine_s) for each in stages.encode)
        self._prefill = Line((each.tokens, each.engine_s) for each in stages.prefill)
        self._steps = _steps(stages)
        self._fixed_s = max(0.0, 2 * self._step(1, 1) - self._step(2, 2))
        self._push = Line((each.tokens, percentile(each.usable_s, P50)) for each in stages.pushes)
        self._pull = Line((each.tokens, each.pull_s) for each in stages.pulls)

    def encode(self, items: Sequence[Media], share: float = 1.0) -> float:
        num = sum(item.num_tokens for item in items) / self._item_tokens
        return self._encode(num) * (1.0 if share >= 1 else self._surface(num, share))

    def forward(self, step: Forward, share: float = 1.0) -> float:
        """What is fixed of a step that both prefills and decodes counts once."""
        seconds = self._prompts(step) if step.prefill_tokens else 0.0
        if step.num_decodes:
            seconds += self._step(step.num_decodes, step.decode_context)
            seconds -= self._fixed_s if step.prefill_tokens else 0.0
        return max(0.0, seconds) / share

    def _prompts(self, step: Forward) -> float:
        """Pieces of prompts of equal size: each costs what the whole prompt up to its end does,
        less what the tokens before it do.
        """
        num = max(1, step.num_prompts)
        tokens = step.prefill_tokens / num
        before = max(0.0, (step.prefill_pairs / num - tokens * (tokens + 1) / 2) / tokens)
        piece_s = self._prefill(before + tokens) - (self._prefill(before) - self._prefill(0))
        return num * piece_s - (num - 1) * min(piece_s, self._fixed_s)

    def _step(self, sequences: float, context: float) -> float:
        """A decode step of so many sequences, which attend to so many tokens in all."""
        mean = context / sequences
        return Line((num, line(mean)) for num, line in self._steps)(sequences)

    def embedding_transfer(self, num_tokens: int) -> float:
        return self._push(num_tokens)

    def kv_transfer(self, num_tokens: int) -> float:
        return self._pull(num_tokens)


@dataclass(frozen=True, slots=True)
class Host:
    """CPU seconds of whatever stands around the engines' steps; each process has one thread of it.

    ``router_request_s``, ``router_token_s``: of the router, for a request and for each token that
    it streams. ``prepare_s``: of a preparation worker, for an item. Of the encoder's API server:
    ``render_s`` for a prompt, ``encode_call_s`` for a call, ``encode_item_s`` for each of its
    items. ``prefill_call_s``: of prefill's API server, for a prompt. ``handover_s``: of prefill's
    core, for a KV cache that is pulled. Of decode's API server: ``decode_call_s`` for an answer,
    ``decode_step_s`` for a step, ``decode_token_s`` for each token of it. ``client_request_s``,
    ``client_token_s``: of whoever asks, which counts only where it runs on the same machine.
    ``idle_cores``: that the engines keep busy all the time.
    """

    router_request_s: float
    router_token_s: float
    prepare_s: float
    render_s: float
    encode_call_s: float
    encode_item_s: float
    prefill_call_s: float
    handover_s: float
    decode_call_s: float
    decode_step_s: float
    decode_token_s: float
    client_request_s: float
    client_token_s: float
    idle_cores: float


def read(path: Path) -> tuple[Profile, Stages]:
    """A profile and its stages. Raises ConfigError, which names the file."""
    made = profiles.read(path)
    if made.stages is None:
        raise ConfigError(f"{path}: {OLDER}")
    return made, made.stages


def costs_of(path: Path) -> ProfileCosts:
    """Raises ConfigError."""
    return costs_from(*read(path))


def costs_from(made: Profile, stages: Stages) -> ProfileCosts:
    return ProfileCosts(stages, made.item_tokens, _surface(made))


def host_of(stages: Stages) -> Host:
    """Lines through what was measured, by least squares of the relative errors."""
    router = _by_tokens(stages, "router")
    client = _by_tokens(stages, "client")
    prepare = [_per_request(stages, load, "preparation") for load in stages.loads]
    encode = fit((each.batch, each.api_s) for each in stages.encode)
    decode = fit((each.sequences, each.api_s) for each in stages.decode)
    one = min(stages.pulls, key=lambda each: each.tokens)
    return Host(
        router_request_s=router[0],
        router_token_s=router[1],
        prepare_s=fmean(prepare),
        render_s=stages.render.api_s,
        encode_call_s=encode[0],
        encode_item_s=encode[1],
        prefill_call_s=fmean(each.api_s for each in stages.prefill),
        handover_s=one.handover_s,
        decode_call_s=max(0.0, one.api_s - sum(decode)),
        decode_step_s=decode[0],
        decode_token_s=decode[1],
        client_request_s=client[0],
        client_token_s=client[1],
        idle_cores=sum(stages.idle_cores.values()),
    )


def fit(points: Iterable[Point]) -> Point:
    """(fixed, per x) of a line, neither below 0, with the least sum of squared relative errors.

    Points whose y is 0 do not count.
    """
    rows = [(x, y) for x, y in points if y > 0]
    weights = [1 / y**2 for _, y in rows]
    w = sum(weights)
    if not w:
        return 0.0, 0.0
    wx = sum(weight * x for weight, (x, _) in zip(weights, rows, strict=True))
    wy = sum(weight * y for weight, (_, y) in zip(weights, rows, strict=True))
    wxx = sum(weight * x * x for weight, (x, _) in zip(weights, rows, strict=True))
    wxy = sum(weight * x * y for weight, (x, y) in zip(weights, rows, strict=True))
    determinant = w * wxx - wx * wx
    slope = (w * wxy - wx * wy) / determinant if determinant > 1e-12 * w * wxx else 0.0
    if slope <= 0:
        return wy / w, 0.0
    fixed = (wy - slope * wx) / w
    return (fixed, slope) if fixed >= 0 else (0.0, wxy / wxx)


def _by_tokens(stages: Stages, process: str) -> Point:
    """(per request, per token of its answer), over all loads."""
    return fit((load.tokens, _per_request(stages, load, process)) for load in stages.loads)


def _per_request(stages: Stages, load: Load, process: str) -> float:
    idle_s = stages.idle_cores.get(process, 0.0) * load.wall_s
    return max(0.0, load.cpu_s.get(process, 0.0) - idle_s) / load.requests


def _steps(stages: Stages) -> list[tuple[float, Line]]:
    """By sequences: seconds of a step by the mean context."""
    rows: dict[int, list[Point]] = {}
    for each in stages.decode:
        rows.setdefault(each.sequences, []).append((each.context, each.engine_s))
    return [(sequences, Line(points)) for sequences, points in sorted(rows.items())]


def _surface(made: Profile) -> Callable[[float, float], float] | None:
    """From forwards alone, medians."""
    rows: dict[int, dict[int, float]] = {}
    for runs in made.runs:
        if not runs.contended:
            rows.setdefault(runs.units, {})[runs.batch] = percentile(runs.forward_s, P50)
    total = made.key.units
    if total not in rows or len(rows) < 2:
        return None
    lines: Mapping[int, Line] = {units: Line(row.items()) for units, row in rows.items()}

    def longer(num: float, share: float) -> float:
        by_units = Line((units, line(num)) for units, line in lines.items())
        return by_units(share * total) / lines[total](num)

    return longer


def _inverse(num: float, share: float) -> float:
    return 1 / share
