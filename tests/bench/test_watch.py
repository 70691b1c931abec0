import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import generate_latest

from easerve.bench import watch
from easerve.bench.watch import (
    Scrape,
    Watch,
    drawn,
    metrics_url,
    num_open_of,
    values_of,
    wait_idle,
    watching,
)
from easerve.serve.metrics import Metrics

Shown = Callable[[], tuple[int, str]]


def scraped(*texts: str, step_s: float = 0.5) -> Watch:
    """A watch that has seen these, one every ``step_s``, and began at 100 s."""
    seen = Watch()
    for number, text in enumerate(texts):
        seen.add(Scrape(100 + number * step_s, drawn(text)))
    return seen


def series(seen: Watch, title: str) -> dict[str, list[float | None]]:
    timeline = seen.timeline()
    assert timeline is not None
    (chart,) = (chart for chart in timeline["charts"] if chart["title"] == title)
    lines: dict[str, list[float | None]] = chart["series"]
    return lines


def queue(encode: float, prefill: float) -> str:
    return (
        "# HELP easerve_queue_length Work that waits\n# TYPE easerve_queue_length gauge\n"
        f'easerve_queue_length{{stage="encode"}} {encode}\n'
        f'easerve_queue_length{{stage="prefill"}} {prefill}\n'
        "easerve_queue_length_seconds 9\nprocess_open_fds 7\n"
    )


def test_a_gauge_is_a_line_for_each_label() -> None:
    seen = scraped(queue(1, 2), queue(3, 4))
    assert series(seen, "Queue lengths") == {"encode": [1, 3], "prefill": [2, 4]}
    timeline = seen.timeline()
    assert timeline is not None
    assert timeline["times_s"] == [0, 0.5]
    assert [chart["unit"] for chart in timeline["charts"]] == ["requests"]


def test_times_can_count_from_the_start_of_the_run() -> None:
    timeline = scraped(queue(1, 2)).timeline(origin_s=98.5)
    assert timeline is not None
    assert timeline["times_s"] == [1.5]


def test_what_was_before_the_run_is_left_out() -> None:
    texts = [f"easerve_output_tokens_total {count}" for count in (50, 60, 80)]
    timeline = scraped(*texts).timeline(origin_s=100.5)
    assert timeline is not None
    assert timeline["times_s"] == [0, 0.5]
    (chart,) = timeline["charts"]
    assert chart["series"] == {"output": [20, 30]}
    assert scraped(*texts).timeline(origin_s=200) is None


def test_only_lines_that_are_drawn_are_kept() -> None:
    kept = drawn(queue(1, 2))
    assert [line.split()[0] for line in kept.splitlines()] == [
        'easerve_queue_length{stage="encode"}',
        'easerve_queue_length{stage="prefill"}',
    ]


def test_what_happened_is_a_rate_over_the_last_second() -> None:
    texts = [f'easerve_encode_busy_seconds_total{{worker="e0"}} {busy_s}' for busy_s in (7, 7.1, 8)]
    shares = series(scraped(*texts), "Encoder busy share")["e0"]
    assert shares == [None, pytest.approx(0.2), pytest.approx(1.0)]


def test_a_window_forgets() -> None:
    texts = [f"easerve_output_tokens_total {count}" for count in (0, 100, 100, 100, 100)]
    assert series(scraped(*texts), "Output tokens")["output"] == [None, 200, 100, 0, 0]


def test_a_counter_that_fell_was_restarted() -> None:
    texts = [f"easerve_output_tokens_total {count}" for count in (50, 3)]
    assert series(scraped(*texts), "Output tokens")["output"] == [None, None]


def test_a_counter_that_appears_began_at_nothing() -> None:
    seen = scraped(queue(0, 0), "easerve_output_tokens_total 5")
    assert series(seen, "Output tokens")["output"] == [None, 10]
    assert series(seen, "Queue lengths")["encode"] == [0, None]


def test_a_histogram_is_the_mean_of_what_it_saw() -> None:
    texts = [
        f"easerve_encode_batch_items_sum {items}\neaserve_encode_batch_items_count {batches}"
        for items, batches in ((10, 10), (16, 12), (16, 12), (16, 12))
    ]
    # Nothing came in the last second of the last one: there is no mean.
    lines = series(scraped(*texts), "Encode batch size")
    assert lines == {"mean of 1 s": [None, 3, 3, None]}


def test_vllm_is_read_too_and_its_models_are_added_up() -> None:
    text = (
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 4.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
        'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25\n'
    )
    seen = scraped(text)
    assert series(seen, "Requests in the engine") == {"running": [7], "waiting": [1]}
    assert series(seen, "KV cache usage") == {"0": [0.5], "1": [0.25]}


def test_what_is_no_number_is_a_gap() -> None:
    texts = [f"easerve_requests_open {value}" for value in ("NaN", "+Inf", "2")]
    assert series(scraped(*texts), "Open requests")["open"] == [None, None, 2]


def test_nothing_that_is_known_is_no_timeline() -> None:
    assert Watch().timeline() is None
    assert scraped("up 1").timeline() is None
    assert values_of('easerve_requests_open{x="') == {}


def test_a_long_run_is_thinned() -> None:
    seen = Watch()
    for number in range(3 * watch.MAX_SCRAPES):
        seen.add(Scrape(number, ""))
    assert len(seen.scrapes) <= watch.MAX_SCRAPES
    assert seen.scrapes[0].at_s == 0
    assert seen.interval_s > watch.INTERVAL_S


def test_our_names_are_those_that_our_server_shows() -> None:
    shown = set(re.findall(r"^# TYPE (\S+)", generate_latest(Metrics().registry).decode(), re.M))
    ours = {line.metric for line in watch.LINES if line.metric.startswith("easerve_")}
    assert ours <= shown


@pytest.mark.parametrize(
    ("url", "at"),
    [
        ("http://h:8000", "http://h:8000/metrics"),
        ("http://h:8000/v1/", "http://h:8000/metrics"),
        ("http://h/team/v1/chat/completions", "http://h/team/metrics"),
    ],
)
def test_metrics_are_beside_the_api(url: str, at: str) -> None:
    assert metrics_url(url) == at


@asynccontextmanager
async def server(shown: Shown) -> AsyncIterator[tuple[str, list[str | None]]]:
    """Its address, and the keys that it was asked with."""
    keys: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        keys.append(request.headers.get("authorization"))
        status, text = shown()
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with TestServer(app) as running:
        yield str(running.make_url("")), keys


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_a_server_is_polled_with_the_key() -> None:
    lengths = iter(range(100))
    async with (
        server(lambda: (200, queue(next(lengths), 0))) as (url, keys),
        watching(f"{url}/v1", "secret", interval_s=0.005) as seen,
    ):
        await until(lambda: len(seen.scrapes) >= 3)
    assert set(keys) == {"Bearer secret"}
    assert series(seen, "Queue lengths")["encode"][:3] == [0, 1, 2]


@pytest.mark.parametrize(
    ("status", "text", "why"),
    [
        (404, "", "HTTP 404"),
        (401, "", "HTTP 401"),
        (302, "", "HTTP 302"),
        (200, "up 1\n", "no metrics that are known here"),
        (200, " " * (watch.MAX_BYTES + 1), "more than 8 MiB of metrics"),
    ],
)
async def test_a_server_that_shows_nothing_is_left_alone(status: int, text: str, why: str) -> None:
    async with (
        server(lambda: (status, text)) as (url, keys),
        watching(url, interval_s=0.001) as seen,
    ):
        await until(lambda: seen.ended)
        await asyncio.sleep(0.01)
    assert len(keys) == 1
    assert seen.ended == why
    assert seen.timeline() is None


async def test_a_server_in_trouble_is_asked_again() -> None:
    answers = iter([(500, "trouble"), (200, queue(1, 1))])
    async with (
        server(lambda: next(answers, (200, queue(2, 2)))) as (url, _),
        watching(url, interval_s=0.001) as seen,
    ):
        await until(lambda: len(seen.scrapes) >= 2)
    assert series(seen, "Queue lengths")["encode"][:2] == [1, 2]


async def test_a_server_that_is_gone_is_no_error() -> None:
    async with watching("http://127.0.0.1:9", interval_s=0.001) as seen:
        await asyncio.sleep(0.02)
    assert seen.timeline() is None
    assert math.isfinite(seen.interval_s)


# Until it is idle ---------------------------------------------------------------------------------


async def test_a_server_is_idle_when_it_has_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "IDLE_INTERVAL_S", 0.001)
    open_now = iter([2, 1, 0])
    async with server(lambda: (200, f"easerve_requests_open {next(open_now)}\n")) as (url, keys):
        assert await wait_idle(url, "secret") is True
    assert keys == ["Bearer secret"] * 3


async def test_waiting_for_that_has_an_end() -> None:
    async with server(lambda: (200, "vllm:num_requests_running 1\n")) as (url, keys):
        assert await wait_idle(url, timeout_s=0) is False
    assert len(keys) == 1


async def test_one_that_does_not_say_is_given_some_time() -> None:
    async with server(lambda: (404, "")) as (url, _):
        assert await wait_idle(url, timeout_s=0) is None
    assert await wait_idle("http://127.0.0.1:9", timeout_s=0) is None


def test_open_requests_are_those_that_run_and_those_that_wait() -> None:
    assert num_open_of("vllm:num_requests_running 3\nvllm:num_requests_waiting 2\n") == 5
    assert num_open_of("easerve_output_tokens_total 3\n") is None
