"""A run as JSON: what ``easerve bench --json`` prints and ``easerve report`` draws."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from yarl import URL

from easerve import __version__
from easerve.bench.job import MAX_CAUSES, OTHER_CAUSES
from easerve.bench.run import Run
from easerve.bench.sample import Sample
from easerve.goodput import Slo, Spread, Summary, small_samples, spread

KIND = "bench"
DIGITS = 6  # of seconds of single requests: microseconds
Result = dict[str, Any]


def head(url: str, model: str, label: str | None = None) -> Result:
    """What was measured. The system is called by its host unless it has a label."""
    address = URL(url).with_user(None)  # a password is nobody's business
    return {
        "kind": KIND,
        "easerve": __version__,
        "system": label or address.authority,
        "url": str(address),
        "model": model,
    }


def result(
    run: Run, slos: Mapping[str, Slo], head: Mapping[str, Any], late: bool = False
) -> Result:
    """All that is known of a run; ``head`` is what comes before it.

    Where the client was too slow, figures that would be taken for the server's are None, unless
    ``late`` allows them.
    """
    because = run.client_too_slow()
    summary = run.summary(slos)
    completed = [each for each in run.samples if each.record.outcome == "completed"]
    itls_s = [itl_s for sample in completed for itl_s in sample.itls_s]
    itl = spread(itls_s)
    small = (*summary.small_sample, *small_samples("itl_s", len(itls_s)))
    summary = replace(summary, small_sample=small)
    if because and not late:
        summary, itl = withheld(summary), Spread()
    return {
        **head,
        "num_warmup": len(run.warmup),
        "valid": not because and not run.stopped,
        "invalid_because": [*because, *stopped(run)],
        **summary.as_dict(),
        "itl_s": asdict(itl),
        "slot_wait_s": asdict(spread([each.record.slot_wait_s for each in run.samples])),
        "slo": {name: asdict(slo) for name, slo in slos.items()},
        "tokens": tokens(completed),
        "causes": causes(run.samples),
        "client": asdict(run.health),
        "requests": columns(run.samples),
        "timeline": run.timeline,
    }


def stopped(run: Run) -> list[str]:
    return [f"the run was stopped after {run.duration_s:.1f} s"] if run.stopped else []


def withheld(summary: Summary) -> Summary:
    """Without what would be taken for the server's figures."""
    return replace(
        summary,
        throughput_per_s=None,
        output_tokens_per_s=None,
        goodput_per_s=dict.fromkeys(summary.goodput_per_s),
        attainment=dict.fromkeys(summary.attainment),
        ttft_s=Spread(),
        tpot_s=Spread(),
        latency_s=Spread(),
    )


def tokens(completed: Sequence[Sample]) -> Result:
    """As the server counts them and as they came, of completed requests.

    ``differing``: streams with another number of chunks than of tokens. A server that puts several
    tokens into a chunk does that, as does one that counts wrongly.
    """
    return {
        "by_usage": sum(each.num_usage_tokens or 0 for each in completed),
        "by_chunks": sum(each.num_chunks for each in completed),
        "differing": sum(
            each.num_usage_tokens not in (None, each.num_chunks)
            for each in completed
            if each.record.first_token_s is not None
        ),
        "without_usage": sum(each.num_usage_tokens is None for each in completed),
        "prompt": sum(each.num_prompt_tokens or 0 for each in completed),
    }


def causes(samples: Sequence[Sample]) -> dict[str, int]:
    """Why requests were not completed, the most frequent first."""
    count = Counter(each.cause for each in samples if each.cause is not None)
    found = dict(count.most_common(MAX_CAUSES))
    if rest := count.total() - sum(found.values()):
        found[OTHER_CAUSES] = rest
    return found


def columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """A list for each value, in the order of the requests. Of what was not completed, TTFT and TPOT
    are of the tokens that came, and the latency is until it ended."""
    records = [each.record for each in samples]
    times = ("scheduled_s", "sent_s", "slot_wait_s", "ttft_s", "tpot_s", "latency_s")
    return {
        **{name: [_rounded(getattr(each, name)) for each in records] for name in times},
        "output_tokens": [each.num_output_tokens for each in records],
        "outcome": [each.outcome for each in records],
    }


def _rounded(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s, DIGITS)
