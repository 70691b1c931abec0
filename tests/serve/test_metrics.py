"""What is counted of encode batches, by itself and over the server."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from easerve.costs.linear import LinearCosts
from easerve.policy.events import Decision, EncodeItem, StartEncode, Waiter
from easerve.serve.metrics import Metrics
from easerve.types import NS_PER_S, BatchId, MediaItem, Modality, RequestId, Stage, WorkerId

from .conftest import Serve
from .server import (
    answer,
    answer_of,
    ask_about,
    error_of,
    key,
    metrics_of,
    picture,
    pictures,
    until,
)

E0, E1 = WorkerId("e0"), WorkerId("e1")
RED, GREEN = picture("red"), picture("green")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    registry: CollectorRegistry = metrics.registry
    return registry.get_sample_value(f"easerve_encode_{name}", labels)


def batch(num_items: int, reason: str = "gap", held_s: float = 0.0, by: str = "") -> StartEncode:
    waiter = (Waiter(RequestId("r"), 0, WorkerId("p0")),)
    items = [
        EncodeItem(MediaItem(f"k{number}", Modality.IMAGE, 4), waiter)
        for number in range(num_items)
    ]
    decision = Decision(reason, 0.0, held_s, by, 0, 0.0, 1.0)
    return StartEncode(BatchId(1), E0, tuple(items), decision)


def busy_s(metrics: Metrics, worker: WorkerId = E0) -> float | None:
    return sample(metrics, "busy_seconds_total", worker=worker)


# By itself ----------------------------------------------------------------------------------------


def test_batches_are_counted_by_size_and_by_why_they_were_closed(metrics: Metrics) -> None:
    for made in (batch(1), batch(3), batch(16, "full"), batch(17, "full")):
        metrics.batch_closed(made, [0.25] * len(made.items))
    assert sample(metrics, "batch_items_count") == 4
    assert sample(metrics, "batch_items_sum") == 37
    buckets = {"1.0": 1, "2.0": 1, "3.0": 2, "16.0": 3, "24.0": 4, "+Inf": 4}
    assert {le: sample(metrics, "batch_items_bucket", le=le) for le in buckets} == buckets
    assert sample(metrics, "batches_total", reason="gap") == 2
    assert sample(metrics, "batches_total", reason="full") == 2
    assert sample(metrics, "wait_seconds_count") == 37
    assert sample(metrics, "wait_seconds_sum") == 0.25 * 37


def test_time_that_a_batch_was_held_back_is_counted_by_who_had_no_room(metrics: Metrics) -> None:
    for held_s, by in ((0.0, ""), (1.0, "decode"), (0.5, "decode"), (2.0, "prefill")):
        metrics.batch_closed(batch(1, held_s=held_s, by=by), [0.0])
    assert sample(metrics, "held_seconds_total", stage="decode") == 1.5
    assert sample(metrics, "held_seconds_total", stage="prefill") == 2
    assert sample(metrics, "held_seconds_total", stage="") is None


def test_an_encoder_is_busy_from_the_begin_of_a_call_to_its_end(metrics: Metrics) -> None:
    for change, at_s in ((1, 1), (-1, 3), (1, 10), (-1, 11)):
        metrics.encoder_busy(E0, change, at_s * NS_PER_S)
    assert busy_s(metrics) == 3
    assert busy_s(metrics, E1) is None


def test_calls_at_one_time_count_once(metrics: Metrics) -> None:
    for change, at_s in ((1, 1), (1, 2), (-1, 3), (1, 4), (-1, 6), (-1, 7)):
        metrics.encoder_busy(E0, change, at_s * NS_PER_S)
    assert busy_s(metrics) == 6


def test_each_encoder_has_its_own_time(metrics: Metrics) -> None:
    for worker, change, at_s in ((E0, 1, 0), (E1, 1, 1), (E0, -1, 2), (E1, -1, 4)):
        metrics.encoder_busy(worker, change, at_s * NS_PER_S)
    assert (busy_s(metrics, E0), busy_s(metrics, E1)) == (2, 3)


# Over the server ----------------------------------------------------------------------------------


async def test_batches_sizes_waits_and_busy_time_add_up(serve: Serve) -> None:
    encode_s = 0.004
    costs = LinearCosts(encode_s, 0.0, 0.0, 0.0, 0.0)
    policy = {"when": "greedy", "max_batch_items": 4, "run_ahead": 0}
    server = await serve(["e0", "e1", "p0", "d0"], costs=costs, policy=policy)
    urls = pictures(12)
    loop = asyncio.get_running_loop()

    async def one(number: int) -> None:
        chosen = [urls[number % 12], urls[number * 5 % 12]]
        assert answer_of(await server.ask(ask_about("which?", *chosen))) == answer(
            "which?", *chosen
        )

    begin = loop.time()
    server.hold("encode")  # until both work and others wait
    clients = asyncio.gather(*map(one, range(40)))
    await until(lambda: server.num_waiting == 40)
    server.release()
    await clients
    wall_s = loop.time() - begin
    found = await metrics_of(server)
    num_calls, num_items = len(server.encode_calls), sum(server.encode_calls)
    assert num_items > num_calls
    reasons = {k: n for k, n in found.items() if k.startswith("easerve_encode_batches_total ")}
    assert sum(reasons.values()) == num_calls == found["easerve_encode_batch_items_count"]
    assert found["easerve_encode_batch_items_sum"] == num_items
    assert found["easerve_encode_wait_seconds_count"] == num_items
    assert 0 < found["easerve_encode_wait_seconds_sum"] < wall_s * num_items
    assert found["easerve_encode_call_seconds_count"] == num_calls
    for name in ("e0", "e1"):
        least_s = encode_s * len(server.engines[name].encode_calls)
        assert least_s <= found[f"easerve_encode_busy_seconds_total {name}"] < wall_s
    assert found["easerve_encode_arrivals_per_second"] > 0
    assert found["easerve_encode_arrivals_cv_ratio"] >= 0
    assert found["easerve_encode_queue_seconds"] == 0


async def test_a_call_that_fails_or_is_cut_short_was_busy_too(serve: Serve) -> None:
    server = await serve(limits={"max_retries": 0})
    encoder = server.engines["e0"]
    encoder.refused = {key(RED)}
    error_of(await server.ask(ask_about("which?", RED)), 400)
    server.hold("encode")
    task = asyncio.create_task(server.ask(ask_about("which?", GREEN)))
    await until(lambda: encoder.calls["encode"] == 2)
    server.lose("e0")
    error_of(await task, 503)
    await server.idle()
    found = await metrics_of(server)
    assert found["easerve_encode_busy_seconds_total e0"] > 0
    assert server.driver.metrics._busy_since[E0][0] == 0, "no call is under way"
    assert found["easerve_encode_batch_items_count"] == 2
    assert found["easerve_encode_call_seconds_count"] == 0


async def test_what_another_request_had_encoded_is_nobodys_time_and_no_wait(serve: Serve) -> None:
    server = await serve()
    server.hold("decode")
    tasks = [asyncio.create_task(server.ask(ask_about("which?", RED)))]
    await server.working("decode")
    (job,) = server.driver._jobs.values()
    before = dict(job.timeline)
    tasks += [
        asyncio.create_task(server.ask(ask_about("which?", url, RED))) for url in (RED, GREEN)
    ]
    await until(lambda: server.num_calls("decode") == 3)
    assert job.timeline == before
    _, second, third = server.driver._jobs.values()
    assert not {"encode", "encode_wait"} & second.timeline.keys()
    assert {"encode", "encode_wait"} <= third.timeline.keys()
    assert (await metrics_of(server))["easerve_encode_wait_seconds_count"] == 2
    server.release()
    for task, urls in zip(tasks, ([RED], [RED, RED], [GREEN, RED]), strict=True):
        assert answer_of(await task) == answer("which?", *urls)


async def test_a_timeline_says_how_long_a_request_waited_for_its_batch(serve: Serve) -> None:
    server = await serve(policy={"when": "greedy"})
    server.hold("encode")
    tasks = [asyncio.create_task(server.ask(ask_about("which?", RED)))]
    await server.working("encode")
    tasks.append(asyncio.create_task(server.ask(ask_about("which?", GREEN))))
    await until(lambda: server.core.queue_lengths()[Stage.ENCODE] == 1)
    await asyncio.sleep(0.1)  # longer than the first one can have waited
    server.release()
    assert [answer_of(await task) for task in tasks] == [answer("which?", u) for u in (RED, GREEN)]
    await server.idle()
    first, second = server.driver.timelines.values()
    assert 0 <= first["encode_wait"] < second["encode_wait"] < second["ttft"]
    assert await metrics_of(server)


async def test_text_waits_for_no_batch(serve: Serve) -> None:
    server = await serve()
    assert answer_of(await server.ask("hello")) == answer("hello")
    await server.idle()
    ((_, timeline),) = server.driver.timelines.items()
    assert "encode_wait" not in timeline
    found = await metrics_of(server)
    assert found["easerve_encode_wait_seconds_count"] == 0
    assert found["easerve_encode_arrivals_per_second"] == 0
