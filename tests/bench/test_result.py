import json
from dataclasses import asdict
from typing import Any

import pytest

from easerve.bench import result
from easerve.bench.run import Run, mean_gap_s
from easerve.bench.sample import Health, Sample
from easerve.goodput import Outcome, Record, Slo

WELL = Health(cpu_share=0.25, loop_lag_p99_s=0.001, priority="real time")
SLOS = {"S1": Slo(1.0, 0.25), "own": Slo(latency_s=100.0)}
HEAD = result.head("http://10.0.0.7:8000/v1/chat/completions", "m")


def sample(
    at_s: float = 0.0,
    outcome: Outcome = "completed",
    cause: str | None = None,
    usage: int | None = 3,
    streamed: bool = True,
) -> Sample:
    """Of three tokens in three chunks; the first after a second, the next two 0.25 s apart."""
    if outcome != "completed":
        return Sample(Record(at_s, at_s, None, at_s + 0.5, 0, outcome), cause)
    chunks = [at_s + 1.0, at_s + 1.25, at_s + 1.5] if streamed else []
    record = Record(at_s, at_s, chunks[0] if chunks else None, at_s + 1.5, usage or 3, outcome)
    return Sample(record, None, at_s + 2, len(chunks), usage, 10, chunks)


def of(*samples: Sample, health: Health = WELL, **more: Any) -> dict[str, Any]:
    run = Run(samples, [sample()] * 2, more.pop("duration_s", 4.0), health, 1.0, **more)
    found = result.result(run, SLOS, {**HEAD, "seed": 0})
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def test_the_keys_that_scripts_rely_on() -> None:
    found = of(sample(), sample(1.0), sample(2.0, "failed", "HTTP 500: it broke"))
    assert {name: found[name] for name in ("kind", "system", "url", "model", "num_warmup")} == {
        "kind": "bench",
        "system": "10.0.0.7:8000",
        "url": "http://10.0.0.7:8000/v1/chat/completions",
        "model": "m",
        "num_warmup": 2,
    }
    assert (found["valid"], found["invalid_because"]) == (True, [])
    assert (found["num_requests"], found["completed"], found["failed"]) == (3, 2, 1)
    assert found["goodput_per_s"] == {"S1": 0.5, "own": 0.5}
    assert found["attainment"] == {"S1": 2 / 3, "own": 2 / 3}
    assert found["throughput_per_s"] == 0.5
    assert found["output_tokens_per_s"] == 1.5
    for name, value in {"ttft_s": 1, "tpot_s": 0.25, "itl_s": 0.25, "latency_s": 1.5}.items():
        assert found[name] == dict.fromkeys(("mean", "p50", "p90", "p99"), value)
    assert found["slot_wait_s"]["p99"] == 0
    assert found["slo"]["S1"] == {"ttft_s": 1.0, "tpot_s": 0.25, "latency_s": None}
    assert found["causes"] == {"HTTP 500: it broke": 1}
    assert found["client"] == asdict(WELL)
    assert found["timeline"] is None
    assert found["requests"] == {
        "scheduled_s": [0, 1, 2],
        "sent_s": [0, 1, 2],
        "slot_wait_s": [0, 0, 0],
        "ttft_s": [1, 1, None],
        "tpot_s": [0.25, 0.25, None],
        "latency_s": [1.5, 1.5, 0.5],
        "output_tokens": [3, 3, 0],
        "outcome": ["completed", "completed", "failed"],
    }


def test_figures_that_may_be_the_clients_are_withheld() -> None:
    slow = Health(cpu_share=0.95, loop_lag_p99_s=0.001)
    found = of(sample(), health=slow)
    assert not found["valid"]
    assert found["invalid_because"] == ["the client was busy for 95% of the time, on one core"]
    for name in ("ttft_s", "tpot_s", "itl_s", "latency_s"):
        assert found[name] == dict.fromkeys(("mean", "p50", "p90", "p99"))
    assert found["goodput_per_s"] == found["attainment"] == {"S1": None, "own": None}
    assert found["throughput_per_s"] is found["output_tokens_per_s"] is None
    assert found["completed"] == 1
    assert found["requests"]["ttft_s"] == [1.0]
    run = Run([sample()], [], 4.0, slow, 1.0)
    late = result.result(run, SLOS, HEAD, late=True)
    assert not late["valid"]
    assert late["ttft_s"]["mean"] == 1.0


def test_a_run_that_was_stopped_is_not_valid_but_says_what_it_saw() -> None:
    found = of(sample(), sample(1.0, "cancelled", "cancelled"), stopped=True, duration_s=2.5)
    assert not found["valid"]
    assert found["invalid_because"] == ["the run was stopped after 2.5 s"]
    assert found["ttft_s"]["mean"] == 1.0
    assert found["cancelled"] == 1


@pytest.mark.parametrize("outcome", ["failed", "rejected", "timed_out", "cancelled"])
def test_a_run_in_which_nothing_was_completed(outcome: Outcome) -> None:
    found = of(*[sample(0.0, outcome, "x")] * 3)
    assert found[outcome] == 3
    assert found["goodput_per_s"] == found["attainment"] == {"S1": 0, "own": 0}
    assert found["ttft_s"]["p99"] is None
    assert found["tokens"]["by_usage"] == 0
    empty = of(duration_s=0.0)
    assert empty["goodput_per_s"] == {"S1": None, "own": None}


def test_tokens_are_counted_in_two_ways() -> None:
    found = of(
        sample(),
        sample(usage=18),
        sample(usage=None),
        sample(usage=7, streamed=False),
        sample(0.0, "failed", "x"),
    )
    assert found["tokens"] == {
        "by_usage": 28,
        "by_chunks": 9,
        "differing": 1,
        "without_usage": 1,
        "prompt": 40,
    }


def test_causes_that_are_many_are_added_up() -> None:
    samples = [sample(0.0, "failed", f"cause {n}") for n in range(30)]
    samples += [sample(0.0, "failed", "cause 29")] * 4
    causes = result.causes(samples)
    assert next(iter(causes.items())) == ("cause 29", 5)
    assert len(causes) == 21
    assert causes["other causes"] == 10


def test_a_password_in_an_address_is_left_out() -> None:
    found = result.head("https://me:secret@host/v1/chat/completions", "m", "ours")
    assert found["url"] == "https://host/v1/chat/completions"
    assert found["system"] == "ours"
    assert "secret" not in json.dumps(result.head("https://me:secret@host/v1", "m"))


def test_few_values_are_named() -> None:
    small = of(sample())["small_sample"]
    assert {"ttft_s.p50", "latency_s.p90", "itl_s.p99", "lateness_p99_s"} <= {*small}


def test_gaps() -> None:
    assert mean_gap_s([0.0, 1.0, 4.0]) == 2.0
    assert mean_gap_s([4.0, 0.0, 1.0]) == 2.0
    assert mean_gap_s([0.0, 0.0]) is mean_gap_s([1.0]) is mean_gap_s([]) is None
