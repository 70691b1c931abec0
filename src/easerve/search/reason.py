"""Why a verdict is as it is, in one sentence, from the runs: which promise breaks, which stage."""

from statistics import fmean

from easerve.goodput import Slo
from easerve.search.advice import SPLIT, Advice, Serving
from easerve.search.contenders import E_PD
from easerve.search.trying import Outcome, Point
from easerve.types import Stage

STALLED = 1.2
"""A step with prompts is so much longer than one without, to be what holds decodes up."""
TOGETHER = "engines that prefill and decode"


def reason(advice: Advice, slo: Slo) -> str:
    """One sentence, without the point at its end."""
    whole, split = advice.whole, advice.split
    if whole is None:
        return f"whole engines cannot be: {_last(advice.impossible['aggregated'])}"
    if split is None:
        name, why = next(iter(advice.impossible.items()))
        return f"nothing can be split: for {name} {_last(why)}"
    if advice.verdict == SPLIT:
        return f"{_broken(whole, advice.traced[whole.name], slo)}; {_apart(split)}"
    return _no_better(whole, split, advice.traced[split.name])


def _last(why: object) -> str:
    return str(why[-1]) if isinstance(why, list | tuple) and why else "unknown"


def _apart(split: Serving) -> str:
    kept = split.capacity
    what = "encodes apart" if split.name == E_PD else "decodes apart"
    upto = f", which keeps it up to {_rate(kept.rate_per_s)}" if kept else ""
    return f"{split.name} ({split.chosen.candidate.name}) {what}{upto}"


def _broken(serving: Serving, traced: Outcome, slo: Slo) -> str:
    """Which promise it breaks first, and what makes it so."""
    point = serving.broken
    if point is None:
        return f"{serving.name} engines keep the promise at all rates, with less goodput"
    if breaks_tpot(point):
        return f"{serving.name} engines break the TPOT promise first: {_slow(point, traced, slo)}"
    return f"{serving.name} engines break the TTFT promise first: {_late(point, traced, slo)}"


def breaks_tpot(point: Point) -> bool:
    """Rather than TTFT, or the latency."""
    late = sum(each.num_late for each in point.outcomes)
    return sum(each.num_slow for each in point.outcomes) >= late


def _slow(point: Point, traced: Outcome, slo: Slo) -> str:
    seen = (
        f"the P90 TPOT reaches {_most(point, 'tpot_s')} where {time_shown(slo.tpot_s)} is promised"
    )
    steps = traced.steps
    assert steps is not None, "it was traced"
    with_prompts, alone = steps.with_prompts_s, steps.decodes_s
    if with_prompts is None or (alone is not None and with_prompts < STALLED * alone):
        return f"at {_rate(point.rate_per_s)} {seen}, as steps of so many decodes take so long"
    usual = "" if alone is None else f" (steps of decodes alone take {time_shown(alone)})"
    return (
        f"at {_rate(point.rate_per_s)} steps with prompts, {time_shown(with_prompts)} each, hold "
        f"decodes up{usual}, so that {seen}"
    )


def _late(point: Point, traced: Outcome, slo: Slo) -> str:
    limit_s = slo.ttft_s if slo.ttft_s is not None else slo.latency_s
    steps = traced.steps
    assert steps is not None, "it was traced"
    return (
        f"at {_rate(point.rate_per_s)} its engines are busy for {_share(_busiest(point)[1])} of "
        f"the time, {_share(steps.prompts_share)} of it in steps with prompts, and requests wait: "
        f"the P90 TTFT reaches {_most(point, 'ttft_s')} where {time_shown(limit_s)} is promised"
    )


def _no_better(whole: Serving, split: Serving, traced: Outcome) -> str:
    ours = f"{split.name} ({split.chosen.candidate.name})"
    kept = "" if whole.capacity is None else f" up to {_rate(whole.capacity.rate_per_s)}"
    if not traced.num_media:
        return (
            f"no request has media, so that the encoders' GPUs have nothing to encode, and whole "
            f"engines keep the promise{kept}"
        )
    if whole.best is None:
        return f"whole engines keep the promise at no rate that was tried, and {ours} is no better"
    point = split.broken
    if point is None:
        return f"whole engines keep the promise as {ours} does, at all rates that were tried"
    encode = fmean(each.utilisation.get(Stage.ENCODE.value, 0.0) for each in point.outcomes)
    return (
        f"at {_rate(point.rate_per_s)} {bottleneck(split.name, point)} of {ours} hold it up while "
        f"its encoders are busy for {_share(encode)} of the time, and whole engines, each of which "
        f"does what there is to do, keep the promise{kept}"
    )


def bottleneck(name: str, point: Point) -> str:
    """The engines that make requests late or slow: a decode engine is busy with one sequence, too,
    so that the share of its time says nothing.
    """
    together = name == E_PD
    if breaks_tpot(point):
        return f"the {TOGETHER if together else 'decode engines'}"
    stage, busy = _busiest(point, but=() if together else (Stage.DECODE,))
    what = TOGETHER if together and stage is Stage.DECODE else f"{stage.value} engines"
    return f"the {what}, busy for {_share(busy)} of the time,"


def _busiest(point: Point, but: tuple[Stage, ...] = ()) -> tuple[Stage, float]:
    shares = {
        stage: fmean(each.utilisation[stage.value] for each in point.outcomes)
        for stage in Stage
        if stage not in but and stage.value in point.outcomes[0].utilisation
    }
    stage = max(shares, key=lambda each: shares[each])
    return stage, shares[stage]


def _most(point: Point, key: str) -> str:
    """Of its seeds."""
    times = [time for each in point.outcomes if (time := getattr(each, key)) is not None]
    return time_shown(max(times)) if times else "endless"


def time_shown(seconds: float | None) -> str:
    """As in 95 ms and 1.2 s."""
    if seconds is None:
        return "no limit"
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _rate(per_s: float) -> str:
    return f"{per_s:.3g}/s"


def _share(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else "all"
