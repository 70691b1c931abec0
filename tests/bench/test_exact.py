"""The client in its own process, over sockets, against a server whose answers are known."""

import random

import pytest

from easerve.bench import result
from easerve.bench.job import Planned, Target
from easerve.bench.run import Run, measure
from easerve.goodput import Slo
from easerve.workload.arrivals import Arrivals

from .scripted import MODEL, Script, parse_steps, serving

pytestmark = pytest.mark.long
BODY = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 64}
SLOS = {"x": Slo(ttft_s=1.0, tpot_s=0.15)}
EARLY_S, LATE_S = 0.002, 0.75  # of a timer, of a machine with much else to do
TTFT_S, TPOT_S, NUM = 0.2, 0.02, 11


async def run_of(script: str, times_s: list[float], ttft_s: float = TTFT_S) -> Run:
    async with serving(Script(parse_steps(script), ttft_s, TPOT_S, NUM)) as server:
        planned = [Planned(at_s, BODY) for at_s in times_s]
        run = await measure(Target(server.url, MODEL), planned, slos=SLOS)
        assert len(server.seen) == len(run.samples) == len(times_s)
    return run


def assert_near(time_s: float | None, expected_s: float) -> None:
    assert time_s is not None
    assert expected_s - EARLY_S <= time_s <= expected_s + LATE_S


async def test_failed_requests_and_goodput() -> None:
    run = await run_of("ok*6,slow*2,err500,sse_error", [0.05 * n for n in range(10)])
    found = result.result(run, SLOS, {}, late=True)
    assert (found["num_requests"], found["completed"], found["failed"]) == (10, 8, 2)
    assert found["attainment"] == {"x": 0.6}
    assert found["goodput_per_s"] == {"x": 6 / run.duration_s}
    assert_near(run.duration_s, 0.35 + 2.0 + 0.2)
    assert found["tokens"]["by_usage"] == found["tokens"]["by_chunks"] == 88
    assert_near(found["ttft_s"]["p50"], TTFT_S)
    assert_near(found["ttft_s"]["p99"], 2.0)
    assert found["causes"] == {
        "HTTP 500: as scripted": 1,
        "error in the answer: as scripted": 1,
    }


async def test_awkward_streams() -> None:
    run = await run_of("ok,one,bundle,late,nousage,badusage", [0.01 * n for n in range(6)])
    ok, one, bundle, late, nousage, badusage = run.records
    for record in run.records:
        assert_near(record.ttft_s, TTFT_S)
    for record in (ok, bundle, late, nousage):
        assert_near(record.latency_s, 0.4)
        assert record.tpot_s is not None
        assert abs(record.tpot_s - TPOT_S) < LATE_S / (NUM - 1)
    assert one.tpot_s is None
    assert badusage.num_output_tokens == NUM + 7
    done_s = run.samples[3].done_s
    assert done_s is not None
    assert_near(done_s - late.sent_s, 0.9)
    assert result.tokens(run.samples) == {
        "by_usage": 3 * NUM + 1 + NUM + 7,
        "by_chunks": 4 * NUM + 1 + 2,
        "differing": 2,
        "without_usage": 1,
        "prompt": 50,
    }


async def test_a_slow_server_changes_no_arrival() -> None:
    """Another plan would show at once: the server's answers take a tenth of the run."""
    times_s = Arrivals("poisson", 100.0).times(200, random.Random(7))
    for ttft_s in (0.01, 0.2):
        run = await run_of("ok", times_s, ttft_s)
        assert [each.scheduled_s for each in run.records] == times_s
        lateness_s = sorted(each.lateness_s for each in run.records)
        assert lateness_s[0] >= 0
        assert lateness_s[100] < 0.02
