"""Results in JSON as our commands write them, of servers that are modelled by a few lines.

Same arguments, same result. The queue is one for ``num_slots`` servers, first come, first served.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from easerve.goodput import Record, Slo, summarise, tier

TIERS = {name: tier(name, 0.05, 0.008) for name in ("S1", "S2", "S3", "S4", "S5")}
PROBE_KEYS = (
    *("seed", "attainment", "goodput_per_s", "ttft_s", "tpot_s", "itl_s", "latency_s"),
    *("num_requests", "completed", "failed", "rejected", "timed_out", "cancelled", "causes"),
    *("duration_s", "throughput_per_s", "output_tokens_per_s", "valid", "invalid_because"),
)
NUM_TOKENS = 32
PATIENCE_S = 4.0
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Server:
    """``first_s``: of an unloaded request's TTFT. ``broken``: share of requests that fail."""

    name: str
    num_slots: int = 4
    first_s: float = 0.04
    token_s: float = 0.008
    broken: float = 0.0


FAST = Server("easerve")
SLOW = Server("vllm", num_slots=3, first_s=0.06, broken=0.01)


def records(server: Server, rate_per_s: float, num_requests: int, seed: int) -> list[Record]:
    random = Random(seed)
    free = [0.0] * server.num_slots
    now, made = 0.0, []
    for _ in range(num_requests):
        now += random.expovariate(rate_per_s)
        begin = max(now, free[0])
        first = begin + server.first_s * random.lognormvariate(0, 0.3)
        crowd = 1 + 0.5 * sum(each > begin for each in free) / server.num_slots
        end = first + (NUM_TOKENS - 1) * server.token_s * crowd * random.uniform(0.9, 1.1)
        sent = now + random.uniform(0, 0.001)
        if random.random() < server.broken:
            made.append(Record(now, sent, None, sent + 0.01, 0, "failed"))
        elif begin - now > PATIENCE_S:
            made.append(Record(now, sent, None, sent + PATIENCE_S, 0, "timed_out"))
        else:
            heapq.heapreplace(free, end)
            first = max(first, sent)
            made.append(Record(now, sent, first, end, NUM_TOKENS, "completed"))
    return made


def bench(
    server: Server = FAST,
    rate_per_s: float = 8.0,
    num_requests: int = 300,
    seed: int = 0,
    slos: Mapping[str, Slo] = TIERS,
    **over: Any,
) -> Json:
    """What ``easerve bench --json`` writes."""
    made = records(server, rate_per_s, num_requests, seed)
    summary = summarise(made, max(each.end_s or 0.0 for each in made), slos).as_dict()
    spread = {"mean": 0.009, "p50": 0.008, "p90": 0.011, "p99": 0.02}
    result = {
        **head(server, "bench", slos),
        "arrival": {"kind": "poisson", "rate_per_s": rate_per_s},
        "seed": seed,
        "num_warmup": 8,
        "valid": True,
        "invalid_because": [],
        **summary,
        "itl_s": spread,
        "slot_wait_s": {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0},
        "reference": None,
        "tokens": {
            "by_usage": NUM_TOKENS * num_requests,
            "by_chunks": NUM_TOKENS * num_requests,
            "differing": 0,
            "without_usage": 0,
            "prompt": 620 * num_requests,
        },
        "causes": _causes(made),
        "client": {"cpu_share": 0.21, "loop_lag_p99_s": 0.0011},
        "requests": columns(made),
    }
    return {**result, "timeline": None if "timeline" in over else timeline(made), **over}


def head(server: Server, kind: str, slos: Mapping[str, Slo]) -> Json:
    return {
        "kind": kind,
        "easerve": "0.1.0",
        "system": server.name,
        "url": f"http://{server.name}.example:8000/v1",
        "model": "tiny-llava",
        "modality": "image",
        "workload": {
            "num_items": 4,
            "image_sizes": "336x336",
            "text_tokens": [16, 64],
            "output_tokens": NUM_TOKENS,
        },
        "slo": {
            name: {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "latency_s": None}
            for name, slo in slos.items()
        },
    }


def _causes(made: Sequence[Record]) -> dict[str, int]:
    words = {
        "failed": "HTTP 500: engine died while it was <busy> [/red] & more",
        "timed_out": f"no whole answer within {PATIENCE_S:g} s",
    }
    counts = {how: sum(each.outcome == how for each in made) for how in words}
    return {words[how]: number for how, number in counts.items() if number}


def columns(made: Sequence[Record]) -> Json:
    return {
        "scheduled_s": [each.scheduled_s for each in made],
        "sent_s": [each.sent_s for each in made],
        "ttft_s": [each.ttft_s for each in made],
        "tpot_s": [each.tpot_s for each in made],
        "latency_s": [each.latency_s for each in made],
        "output_tokens": [each.num_output_tokens for each in made],
        "outcome": [each.outcome for each in made],
        "slot_wait_s": [0.0 for _ in made],
    }


def timeline(made: Sequence[Record]) -> Json:
    """Waves that look like a server's."""
    end_s = max(each.end_s or 0.0 for each in made)
    times = [0.2 * number for number in range(math.ceil(end_s / 0.2))]
    waiting = [
        float(sum(each.sent_s <= time < (each.first_token_s or 0.0) for each in made))
        for time in times
    ]
    decoding = [
        float(sum((each.first_token_s or math.inf) <= time < (each.end_s or 0) for each in made))
        for time in times
    ]
    wave = [0.5 + 0.4 * math.sin(time) for time in times]
    charts = [
        ("Queue lengths", "requests", {"encode": waiting, "prefill": [w / 3 for w in waiting]}),
        ("Encode batch size", "items", {"mean over 1 s": [None, *(1 + 4 * w for w in wave[1:])]}),
        ("Remote share", "share", {"in force": wave, "realised": [w * 0.9 for w in wave]}),
        ("Open requests", "requests", {"decode": decoding}),
    ]
    return {
        "times_s": times,
        "charts": [
            {"title": title, "unit": unit, "series": series} for title, unit, series in charts
        ],
    }


def goodput(server: Server = FAST, rates: Sequence[float] = (4, 8, 16, 24)) -> Json:
    """What ``easerve bench goodput --json`` writes."""
    probes = []
    for rate in rates:
        for seed in (0, 1):
            run = bench(server, rate, 200, seed)
            probes.append({"rate_per_s": rate, **{key: run[key] for key in PROBE_KEYS}})
    found = {name: _kept(probes, name) for name in TIERS}
    best = {name: _best(probes, name) for name in TIERS}
    return {
        **head(server, "goodput", TIERS),
        "arrival": {"kind": "poisson"},
        "seed": 0,
        "attainment_wanted": 0.9,
        "max_rate_per_s": {name: kept for name, (kept, _) in found.items()},
        "bracket_per_s": {name: list(ends) for name, ends in found.items()},
        "best_goodput_per_s": {name: value for name, (value, _) in best.items()},
        "best_goodput_at_per_s": {name: rate for name, (_, rate) in best.items()},
        "valid": True,
        "invalid_because": [],
        "notes": [],
        "probes": probes,
    }


def _kept(probes: Sequence[Json], name: str) -> tuple[float | None, float | None]:
    """The highest rate that was kept by all seeds, and the lowest that was not."""
    broken = {each["rate_per_s"] for each in probes if each["attainment"][name] < 0.9}
    kept = {each["rate_per_s"] for each in probes if each["rate_per_s"] < min(broken, default=1e9)}
    return max(kept, default=None), min(broken, default=None)


def _best(probes: Sequence[Json], name: str) -> tuple[float, float]:
    return max((each["goodput_per_s"][name], each["rate_per_s"]) for each in probes)


def simulated(server: Server = FAST, rates: Sequence[float] = (4, 8, 16)) -> Json:
    """What ``easerve simulate --json`` writes for several rates."""
    rows = []
    for rate in rates:
        made = records(Server(server.name, first_s=0.9 * server.first_s), rate, 300, 7)
        summary = summarise(made, max(each.end_s or 0.0 for each in made), TIERS).as_dict()
        extra = {"utilisation": {"encode": 0.5, "prefill": 0.3, "decode": 0.7}, "bound_per_s": 20.0}
        rows.append({"system": server.name, "rate_per_s": rate, "seed": 7, **summary, **extra})
    return {"kind": "simulate", "runs": rows}
