import asyncio
from collections.abc import AsyncIterator

import pytest

from easerve.bench import loop, models
from easerve.bench.client import LoadError
from easerve.bench.job import Planned, Progress, Target
from easerve.bench.run import measure
from easerve.config import ConfigError
from easerve.goodput import Slo

from .scripted import MODEL, Script, Scripted, serving
from .stand_in import until

BODY = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 4}
QUICK = Script(("ok",), 0.01, 0.002, 4)


@pytest.fixture
async def server() -> AsyncIterator[Scripted]:
    async with serving(QUICK) as started:
        yield started


@pytest.fixture
def without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes most of a test's time."""
    monkeypatch.setattr("easerve.bench.run.in_process", loop.run)


INSIDE = pytest.mark.usefixtures("without_a_process")


def planned(*times_s: float) -> list[Planned]:
    return [Planned(at_s, BODY) for at_s in times_s]


async def test_a_run(server: Scripted) -> None:
    told: list[Progress] = []
    run = await measure(
        Target(server.url, MODEL),
        planned(0.0, 0.02, 0.04),
        warmup=planned(0.0, 0.0),
        slos={"x": Slo(ttft_s=5.0)},
        on_progress=told.append,
        watch=True,  # it has no metrics
    )
    assert len(server.seen) == 5
    assert [each.outcome for each in run.records] == ["completed"] * 3
    assert (len(run.warmup), run.stopped, run.timeline) == (2, False, None)
    assert run.mean_gap_s == pytest.approx(0.02)
    assert run.duration_s == max(each.end_s or 0 for each in run.records)
    assert told[-1] == Progress(2, 3, 3, {"x": 3}, {})
    assert run.summary({"x": Slo(ttft_s=5.0)}).attainment == {"x": 1.0}
    assert [each.num_prompt_tokens for each in run.samples] == [10] * 3


@INSIDE
async def test_a_closed_loop_has_no_gaps(server: Scripted) -> None:
    run = await measure(Target(server.url, MODEL), planned(0, 0, 0), concurrency=1)
    assert run.mean_gap_s is None
    assert server.most_open == 1


@INSIDE
async def test_warm_ups_of_which_none_is_answered() -> None:
    async with serving(Script(("err500", "err429"))) as server:
        with pytest.raises(LoadError, match=r"none of 2 warm-up .* HTTP 500: .*; HTTP 429: as scr"):
            await measure(Target(server.url, MODEL), planned(0.0), warmup=planned(0.0, 0.0))
        assert len(server.seen) == 2


@INSIDE
async def test_a_stop() -> None:
    async with serving(Script(("ok", "hang"), 0.01, 0.002, 4)) as server:
        stop = asyncio.Event()
        run = asyncio.create_task(
            measure(Target(server.url, MODEL), planned(0.0, 0.0, 60.0), stop=stop)
        )
        await until(lambda: len(server.seen) == 2 and server.num_open == 1)
        stop.set()
        done = await run
    assert done.stopped
    assert sorted(each.outcome for each in done.records) == ["cancelled", "completed"]
    assert 0 < done.duration_s < 30


# Which models there are ---------------------------------------------------------------------------


async def test_models_are_told(server: Scripted) -> None:
    for url in ("", "/v1", "/v1/chat/completions", "/v1/completions"):
        assert await models.served(server.url + url) == [MODEL]
    assert await models.served(f"{server.url}/elsewhere") is None


async def test_a_server_that_is_not_there() -> None:
    with pytest.raises(LoadError, match=r"127.0.0.1:9/v1/models: .*is the server up"):
        await models.served("http://127.0.0.1:9")


def test_which_model_is_asked() -> None:
    assert models.chosen(None, ["a"]) == "a"
    assert models.chosen("b", ["a", "b"]) == "b"
    assert models.chosen("b", None) == "b"
    for given, there, wrong in (
        ("c", ["a", "b"], "--model c: the server has a, b"),
        (None, ["a", "b"], "name a model with --model; the server has a, b"),
        (None, [], "the server has none"),
        (None, None, "does not tell its models"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            models.chosen(given, there)
