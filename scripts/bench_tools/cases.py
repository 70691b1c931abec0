"""What is asked of the tools, and what the scripted server's answers are by its script."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tests.bench.scripted import SLOW, Script, parse_steps

from easerve.goodput import percentile

TTFT_S, TPOT_S, TOKENS = 0.4, 0.04, 16
FAILING = ("err500", "err429", "sse_error", "cut", "short", "late_error", "empty")
SLO_TTFT_S, SLO_TPOT_S = 1.0, 0.05  # what goodput is by
TIMES = ("ttft_s", "tpot_s", "itl_s", "latency_s")
PARTS = ("mean", "p50", "p99")
COUNTS = ("completed", "failed")
RATES = ("throughput_per_s", "output_tokens_per_s", "goodput_per_s")
# Not the 99th percentile: of 100 requests, one that this machine held up is enough for another.
STEADY = tuple(f"{name}.{part}" for name in ("ttft_s", "tpot_s", "latency_s") for part in PARTS[:2])
Figures = dict[str, float | None]
"""By name of the metric: seconds, requests or tokens per second, numbers of requests."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run. ``role_delay_s`` None: the role comes with the first token. ``agreed``: the metrics
    in which all tools must say what the script says.
    """

    title: str
    text: str
    steps: str = "ok"
    role_delay_s: float | None = None
    rate_per_s: float | None = 10.0
    concurrency: int | None = None
    poisson: bool = False
    num_requests: int = 100
    agreed: tuple[str, ...] = ()

    @property
    def script(self) -> Script:
        return Script(parse_steps(self.steps), TTFT_S, TPOT_S, TOKENS, self.role_delay_s)


CASES = (
    Case(
        "At a constant rate",
        "The role comes with the first token, as in vLLM's server.",
        agreed=(*STEADY, *COUNTS, *RATES),
    ),
    Case(
        "Poisson arrivals",
        "The same, at times that each tool draws for itself.",
        poisson=True,
        agreed=(*STEADY, *COUNTS),
    ),
    Case(
        "A closed loop of 4",
        "The same, sent by 4 workers.",
        rate_per_s=None,
        concurrency=4,
        num_requests=60,
        agreed=(*STEADY, *COUNTS, *RATES),
    ),
    Case(
        "The role first",
        "The chunk with the role comes at once, the first token 0.4 s later.",
        role_delay_s=0.0,
        agreed=("latency_s.mean", "latency_s.p50", *COUNTS),
    ),
    Case(
        "Failures",
        "Of 12 answers, 6 are right, 1 takes ten times as long to its first token, 5 go wrong: an "
        "HTTP 500, an HTTP 429, an error as an event of the stream, a connection that breaks off "
        "after 3 tokens, a stream with nothing but its end.",
        steps="ok*2,err500,ok*2,err429,slow,sse_error,ok,cut,ok,empty",
        num_requests=96,
        agreed=(*STEADY, *COUNTS),
    ),
    Case(
        "Answers that stop",
        "Of 5 answers, 3 are right; one stream ends properly after 3 tokens, without a reason and "
        "without its last event; one has an error as an event after 3 tokens.",
        steps="ok*2,short,ok,late_error",
    ),
    Case(
        "Streams of other forms",
        "Of 7 answers, 2 are as before; one puts all tokens but the first into one chunk, one has "
        "its usage half a second late, one has one token, one has no usage, one counts 7 tokens "
        "too many in it.",
        steps="ok*2,bundle,late,one,nousage,badusage",
        num_requests=98,
        agreed=("ttft_s.p50", "tpot_s.p50", *COUNTS),
    ),
)


def scripted(case: Case) -> Figures:
    """What the script says; percentiles are by nearest rank."""
    steps = [case.script.steps[n % len(case.script.steps)] for n in range(case.num_requests)]
    right = [step for step in steps if step not in FAILING]
    ttfts = [TTFT_S * (SLOW if step == "slow" else 1) for step in right]
    counts = [1 if step == "one" else TOKENS for step in right]
    lasts = [(count - 1) * TPOT_S for count in counts]
    gaps = [gap for step, count in zip(right, counts, strict=True) for gap in _gaps(step, count)]
    values = {
        "ttft_s": ttfts,
        "tpot_s": [TPOT_S] * sum(count > 1 for count in counts),
        "itl_s": gaps,
        "latency_s": [ttft + last for ttft, last in zip(ttfts, lasts, strict=True)],
    }
    figures: Figures = {}
    for name, each in values.items():
        figures[f"{name}.mean"] = fmean(each)
        figures |= {f"{name}.p{percent}": percentile(each, percent) for percent in (50, 99)}
    duration_s = _duration_s(case, values["latency_s"])
    figures["throughput_per_s"] = None if duration_s is None else len(right) / duration_s
    figures["output_tokens_per_s"] = None if duration_s is None else sum(counts) / duration_s
    figures["goodput_per_s"] = figures["throughput_per_s"]  # where there is one, all are good
    return {**figures, "completed": len(right), "failed": len(steps) - len(right)}


def _gaps(step: str, count: int) -> list[float]:
    """Between chunks with tokens."""
    return [(count - 1) * TPOT_S] if step == "bundle" else [TPOT_S] * (count - 1)


def _duration_s(case: Case, latencies_s: Sequence[float]) -> float | None:
    """Where answers are all alike and arrivals are not drawn."""
    if case.poisson or case.steps != "ok":
        return None
    if case.rate_per_s is not None:
        return case.num_requests / case.rate_per_s + latencies_s[-1]
    assert case.concurrency is not None
    return -(-case.num_requests // case.concurrency) * latencies_s[0]
