import os
import threading
import time
from typing import Any

import pytest

from easerve.engines.vllm.ec.consumer import (
    GRACE_S,
    IDLE_S,
    STEPS_IN_FLIGHT,
    ConsumerScheduler,
    Loads,
    load,
)
from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import Item
from easerve.engines.vllm.ec.store import Placed, Store

from .requests import ended, request

TIMEOUT_S = 30.0


class Engine:
    """The scheduler half at a time that the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store, self.arrived = Store(1 << 20, 3), threading.Event()
        self.half = ConsumerScheduler(self.store, self.arrived, TIMEOUT_S, lambda: self.now)

    def push(self, *keys: str, num_embeddings: int = 2) -> None:
        memory = Memory.of([memoryview(bytes(4 * num_embeddings))])
        items = [Item(key, 0, (num_embeddings, 1), "float32") for key in keys]
        self.store.add(memory, items, 0.5)
        self.arrived.set()


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_request_waits_for_all_of_its_items(engine: Engine) -> None:
    waiting = request("r", "a", "b", coming=[0, 1])
    assert not engine.half.is_ready(waiting, 0)
    engine.push("a")
    assert not engine.half.is_ready(waiting, 0)
    engine.push("b")
    engine.now += 2
    assert engine.half.is_ready(waiting, 0)
    assert engine.half.take_unavailable() == set()


def test_items_may_come_before_the_request(engine: Engine) -> None:
    engine.push("a")
    assert engine.half.is_ready(request("r", "a", coming=[]), 0)


def test_items_whose_tokens_are_computed_are_not_needed(engine: Engine) -> None:
    partly = request("r", "a", "b", coming=[0, 1])
    engine.push("b")
    assert not engine.half.is_ready(partly, 3)
    assert engine.half.is_ready(partly, 4)


@pytest.mark.parametrize(
    ("params", "wait_s"),
    [
        ({"coming": [0]}, TIMEOUT_S),
        ({"coming": []}, GRACE_S),
        ({"coming": [1]}, GRACE_S),
        ({"coming": "all"}, GRACE_S),
        ({}, GRACE_S),
    ],
)
def test_it_is_given_up_after_its_time(
    engine: Engine, params: dict[str, Any], wait_s: float
) -> None:
    late = request("r", "a", **params)
    assert not engine.half.is_ready(late, 0)
    engine.now += wait_s - 0.01
    assert not engine.half.is_ready(late, 0)
    assert engine.half.take_unavailable() == set()
    engine.now += 0.02
    assert not engine.half.is_ready(late, 0)
    assert engine.half.take_unavailable() == {"r"}
    assert engine.half.take_unavailable() == set()


def test_a_request_that_is_given_up_harms_no_other(engine: Engine) -> None:
    engine.push("b")
    assert not engine.half.is_ready(request("r", "a", coming=[]), 0)
    engine.now += 1
    assert not engine.half.is_ready(request("r", "a", coming=[]), 0)
    assert engine.half.is_ready(request("s", "b", coming=[]), 0)
    assert engine.half.take_unavailable() == {"r"}


def test_items_are_held_until_the_request_ends(engine: Engine) -> None:
    reading = request("r", "a", coming=[0, 1])
    engine.half.is_ready(reading, 0)
    engine.push("a")
    for key in "bcde":
        engine.push(key)
    assert engine.half.is_ready(reading, 0)
    engine.half.finish(ended(reading))
    engine.push("f")
    assert engine.store.missing("a")


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
def test_an_aborted_request_leaves_nothing_behind_and_takes_no_news(
    engine: Engine, status: str
) -> None:
    waiting = request("r", "a", coming=[])
    engine.half.is_ready(waiting, 0)
    engine.now += 1
    engine.half.is_ready(waiting, 0)
    engine.push("b")
    assert engine.half.finish(ended(waiting, status)) is None
    assert engine.half.take_unavailable() == set()
    told = engine.half.finish(ended(request("s")))
    assert told == {"bundles": [[1, 8, 0.5]]}


def test_an_item_of_another_length_counts_as_missing(engine: Engine) -> None:
    wrong = request("r", "a", coming=[0, 1], num_embeddings=3)
    engine.push("a")
    assert not engine.half.is_ready(wrong, 0)
    assert engine.store.missing("a") == ("a",), "so that it is asked for again"
    engine.push("a", num_embeddings=3)
    assert engine.half.is_ready(wrong, 0)


def test_only_the_store_says_what_is_there(engine: Engine) -> None:
    engine.push("a")
    assert engine.half.has_item("a")
    assert not engine.half.has_item("b")


def test_a_step_takes_what_was_asked_of_it_once(engine: Engine) -> None:
    engine.push("a", "b")
    engine.half.load("b")
    engine.half.load("c")
    assert list(engine.half.end_step(5).items) == ["b"]
    assert engine.half.end_step(5) == Loads()


def test_the_memory_of_a_step_stays_for_workers_that_open_it_late(engine: Engine) -> None:
    engine.push("a")
    engine.half.load("a")
    placed = engine.half.end_step(5).items["a"]
    assert isinstance(placed.memory, Memory)
    fd = placed.memory.fd
    for key in "bcde":
        engine.push(key)
    del placed
    assert engine.store.missing("a")
    duplicate = Memory.received(os.dup(fd))
    assert duplicate.num_bytes == 8
    for _ in range(STEPS_IN_FLIGHT):
        engine.half.end_step(5)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_engine_that_did_nothing_for_want_of_items_sleeps_until_something_comes(
    engine: Engine,
) -> None:
    waiting = request("r", "a", coming=[0, 1])

    def look() -> float:
        begin = time.perf_counter()
        engine.half.is_ready(waiting, 0)
        return time.perf_counter() - begin

    assert look() < IDLE_S, "it may have other work"
    engine.half.end_step(0)
    assert look() >= IDLE_S
    assert look() < IDLE_S, "once in a step"
    engine.half.end_step(7)
    assert look() < IDLE_S, "there is work"
    engine.half.end_step(0)
    engine.push("a")
    assert look() < IDLE_S, "it has come"
    assert engine.half.is_ready(waiting, 0)


def test_the_reply_says_how_long_it_waited_what_came_and_what_went(engine: Engine) -> None:
    waiting = request("r", "a", coming=[0, 1])
    engine.half.is_ready(waiting, 0)
    engine.now += 2
    for key in "bcda":
        engine.push(key)
    engine.half.is_ready(waiting, 0)
    engine.now += 2
    engine.half.is_ready(waiting, 0)
    assert engine.half.finish(ended(waiting)) == {
        "wait_s": 2.0,
        "bundles": [[1, 8, 0.5]] * 4,
        "evicted": ["b"],
    }
    assert engine.half.finish(ended(request("s"))) is None


def test_a_load_is_the_bundles_memory_and_spares_what_is_cached() -> None:
    torch = pytest.importorskip("torch")
    values = torch.arange(6, dtype=torch.float32).view(2, 3)
    memory = Memory.of([memoryview(values.numpy()).cast("B")])
    placed = Placed(memory, Item("a", 0, (2, 3), "float32"))
    cache = {"b": torch.ones(1)}
    load(Loads({"a": placed, "b": placed}), cache, "cpu")
    assert torch.equal(cache["a"], values)
    assert torch.equal(cache["b"], torch.ones(1))
