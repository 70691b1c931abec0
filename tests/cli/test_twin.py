"""``easerve bench twin``: the model of a deployment, what is compared, what is asked wrongly."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from easerve.bench.report import html
from easerve.cli.bench import twin, twin_shown
from easerve.config import Deployment
from easerve.costs import profile
from easerve.costs.base import Media
from easerve.engines.protocol import EngineError
from easerve.goodput import Record
from easerve.policy.events import Prepared, RequestReceived
from easerve.sim.run import Request
from easerve.types import MediaItem, Modality, RequestId, Shape, Stage

from ..costs import stages, test_profile
from .conftest import Easerve

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/tiny-llava.yaml"
MEASURED = ROOT / "profiles/amd-epyc-2-cores/tiny-llava.yaml"
ITEM = Media(Modality.IMAGE, 25)


def model() -> twin.Model:
    deployment = Deployment.model_validate(
        {"model": "a/b", "decode": {"max_num_seqs": 16}, "policy": {"when": "greedy"}}
    )
    return twin.model_of(deployment, stages.made(), 25, 8191, 10_000)


# Asked ------------------------------------------------------------------------------------------


def test_what_cannot_be_compared_is_a_usage_error(easerve: Easerve, tmp_path: Path) -> None:
    older = tmp_path / "older.yaml"
    profile.write(test_profile.made(test_profile.runs(1, 1, 0.02)), older)
    for options, message in (
        (("--rates", "0"), "--rates: 0 is not from 0.001"),
        (("--profile", tmp_path / "no.yaml"), "no.yaml: No such file"),
        (("--profile", older), "older.yaml: stages: measured by an older easerve profile"),
        (("--html", "/no/such.html"), "such.html: No such file"),
    ):
        ended = easerve("bench", "twin", EXAMPLE, *options)
        assert (ended.code, ended.out) == (2, "")
        assert message in ended.err


# Model ------------------------------------------------------------------------------------------


def test_a_twin_is_made_as_its_deployment_says() -> None:
    config = model().config
    assert (config.prefill.max_num_seqs, config.decode.max_num_seqs) == (256, 16)
    assert config.prefill.kv_cache_tokens == config.decode.kv_cache_tokens == 10_000
    assert config.encode.max_num_batched_tokens == 8191
    assert config.policy.when == "greedy"
    assert (config.prepare_s, config.encode.dispatch_s, config.encode.item_s) == (0, 0, 0)


def test_a_request_alone_takes_what_its_parts_take() -> None:
    """All of them, but for prefill's API server, which is at work while encode is."""
    run = model().simulate([Request(0.0, (ITEM,), 39, 11)], seed=0)
    (record,) = run.records
    asked = 0.5 + 3 + 0.6 + 2.5
    encoded = 4.5 + 3 + 0.4
    prefilled = 3 + 0.64
    first = 1 + 2 + (1 + 0.1 + 0.064) + 0.25 + 0.04 + 0.02
    assert record.ttft_s is not None
    assert 1e3 * record.ttft_s == pytest.approx(asked + encoded + prefilled + first, rel=0.02)
    assert record.tpot_s is not None
    assert 1e3 * record.tpot_s == pytest.approx(1 + 0.1 + 0.069, rel=0.02)
    assert run.stages.keys() == {"e0", "p0", "d0"}


def test_requests_that_come_together_share_the_cores() -> None:
    alone = model().simulate([Request(0.0, (ITEM,), 39, 11)], seed=0).records
    several = model().simulate([Request(0.0, (ITEM,), 39, 11)] * 8, seed=0).records
    assert len(several) == 8
    assert all(record.outcome == "completed" for record in several)
    fastest = min(record.ttft_s or 0.0 for record in several)
    assert fastest > 1.5 * (alone[0].ttft_s or 0.0)


# Requests ---------------------------------------------------------------------------------------


def test_requests_are_what_the_router_understood() -> None:
    watch = twin.Watch()
    first, second = RequestId("b"), RequestId("a")
    watch.step(0, [RequestReceived(RequestId("before"), 1, ())], [])
    watch.reset()
    watch.step(1, [RequestReceived(first, 1, (Modality.IMAGE,))], [])
    watch.step(2, [RequestReceived(second, 1, ())], [])
    with pytest.raises(EngineError, match="request 'b' was not prepared"):
        watch.shapes()
    picture = Shape(40, 9, (MediaItem("k", Modality.IMAGE, 25),))
    watch.step(3, [Prepared(second, Shape(7, 5)), Prepared(first, picture)], [])
    shapes = watch.shapes()
    assert shapes == [picture, Shape(7, 5)]
    assert twin.requests([0.5, 0.75], shapes) == [
        Request(0.5, (ITEM,), 15, 9),
        Request(0.75, (), 7, 5),
    ]
    with pytest.raises(EngineError, match="1 requests did not reach the router"):
        twin.requests([0.5, 0.75, 1.0], shapes)


# Compared ---------------------------------------------------------------------------------------


def side(ttfts_s: Sequence[float], busy_s: Mapping[str, float]) -> twin.Side:
    """Rounds of one request each, of 11 tokens, that takes 10 ms a token."""
    made = twin.Side([], [], [])
    for ttft_s in ttfts_s:
        record = Record(1.0, 1.0, 1 + ttft_s, 1.1 + ttft_s, 11, "completed")
        made.add([record], busy_s)
    return made


BUSY: Mapping[str, float] = dict.fromkeys(map(str, Stage), 0.05)


def test_rounds_are_pooled() -> None:
    row = side([0.1, 0.2, 0.4], BUSY).row()
    assert row["ttft_s.p50"] == pytest.approx(0.2)
    assert row["ttft_s.p99"] == pytest.approx(0.4)
    assert row["tpot_s.mean"] == pytest.approx(0.01)
    assert row["throughput_per_s"] == pytest.approx((1 / 0.2 + 1 / 0.3 + 1 / 0.5) / 3)
    assert row["busy.decode"] == pytest.approx(0.05 * row["throughput_per_s"])
    assert row["not_completed"] == 0


def test_an_error_is_a_share_of_what_was_measured() -> None:
    row = twin.compared(5.0, side([0.2], BUSY).row(), side([0.1], {**BUSY, "decode": 0.0}).row())
    assert row["error"]["ttft_s.mean"] == pytest.approx(-0.5)
    assert row["error"]["tpot_s.p99"] == pytest.approx(0)
    assert row["error"]["throughput_per_s"] == pytest.approx(0.5)
    assert row["error"]["busy.decode"] is None


def test_what_came_of_it_goes_onto_a_page() -> None:
    rows = [
        twin.compared(rate, side([0.2], BUSY).row(), side([0.1], BUSY).row())
        | {"slower": 1.25, "others_cores": 0.5}
        for rate in (5.0, 10.0)
    ]
    result = {"rates": rows, "num_requests": 1, "num_cores": 2, "profile": "measured in this run"}
    page = html("twin", twin_shown.of_twin(json.loads(json.dumps(result))))
    assert "TTFT P99, ms" in page
    assert "-50 %" in page
    assert "1.25 to 1.25 times" in page
    assert page.count("<figure") == 5


@pytest.mark.engines
def test_the_tiny_model_has_a_twin(easerve: Easerve) -> None:
    options = ("--rates", "4,8", "--requests", "8", "--json", "--profile", MEASURED)
    ended = easerve("bench", "twin", EXAMPLE, *options)
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert [row["rate_per_s"] for row in result["rates"]] == [4, 8]
    assert str(MEASURED) in result["profile"]
    for row in result["rates"]:
        assert row["measured"]["not_completed"] == row["simulated"]["not_completed"] == 0
        assert row["measured"]["ttft_s.p50"] > 0
        assert None not in row["error"].values()
