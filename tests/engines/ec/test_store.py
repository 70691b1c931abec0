import random
from typing import Any

import pytest

from easerve.engines.vllm.ec.messages import Item
from easerve.engines.vllm.ec.store import Arrival, Store


class FakeMemory:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def push(store: Store, *keys: str, num_bytes: int = 10) -> Any:
    memory: Any = FakeMemory(num_bytes)
    store.add(memory, [Item(key, 0, (1, 1), "float32") for key in keys], 0.5)
    return memory


def keys_of(store: Store) -> set[str]:
    return {key for key in "abcdefgh" if store.get(key)}


def memories_of(store: Store) -> set[Any]:
    return {placed.memory for key in "abcdefgh" if (placed := store.get(key))}


@pytest.fixture
def store() -> Store:
    """Has place for three bundles of ten bytes."""
    return Store(max_bytes=30, max_bundles=100)


def test_an_item_is_found_with_the_memory_of_its_bundle(store: Store) -> None:
    memory = push(store, "a", "b")
    placed = store.get("b")
    assert placed is not None
    assert (placed.memory, placed.item.key) == (memory, "b")
    assert store.missing(["a", "c", "b", "d"]) == ("c", "d")


def test_the_bundle_used_least_recently_goes_whole(store: Store) -> None:
    push(store, "a", "b")
    push(store, "c")
    push(store, "d")
    store.hold("r", ["a"])
    store.release("r")
    push(store, "e")
    assert keys_of(store) == {"a", "b", "d", "e"}
    push(store, "f")
    push(store, "g")
    assert keys_of(store) == {"e", "f", "g"}
    assert store.take_news()[1] == ["c", "d", "a", "b"]
    assert store.num_bytes == 30


def test_what_a_request_holds_stays_until_it_lets_go(store: Store) -> None:
    push(store, "a", "b")
    store.hold("r", ["b", "b"])
    store.hold("s", ["b"])
    for key in "cdef":
        push(store, key)
    assert keys_of(store) == {"a", "b", "e", "f"}
    store.release("r")
    push(store, "g")
    assert "b" in keys_of(store)
    store.release("s")
    push(store, "h")
    assert keys_of(store) == {"f", "g", "h"}


def test_an_item_may_be_held_before_it_comes(store: Store) -> None:
    store.hold("r", ["a"])
    for key in "abcdef":
        push(store, key)
    assert keys_of(store) == {"a", "e", "f"}


def test_more_is_kept_than_there_is_place_for_only_while_it_is_held(store: Store) -> None:
    store.hold("r", "abcde")
    for key in "abcde":
        push(store, key)
    assert store.num_bytes == 50
    store.release("r")
    assert keys_of(store) == {"c", "d", "e"}


def test_a_bundle_larger_than_the_store_stays_until_the_next(store: Store) -> None:
    push(store, "a", num_bytes=100)
    assert keys_of(store) == {"a"}
    push(store, "b")
    assert keys_of(store) == {"b"}


def test_a_duplicate_is_ignored_and_a_bundle_of_nothing_else_is_not_kept(store: Store) -> None:
    first = push(store, "a", "b")
    push(store, "b", "a", num_bytes=1000)
    assert store.num_bytes == 10
    push(store, "b", "c")
    placed = store.get("b")
    assert placed is not None
    assert placed.memory is first
    assert store.num_bytes == 20


def test_an_item_named_twice_in_a_bundle_is_one(store: Store) -> None:
    push(store, "a", "a")
    for key in "bcd":
        push(store, key)
    assert keys_of(store) == {"b", "c", "d"}


def test_what_came_for_a_request_not_yet_seen_stays_unless_there_is_too_much() -> None:
    now = 100.0
    store = Store(max_bytes=30, max_bundles=100, fresh_s=5, clock=lambda: now)
    for key in "abc":
        push(store, key)
    store.hold("r", ["b"])
    store.release("r")
    push(store, "d")
    assert keys_of(store) == {"a", "c", "d"}, "b is younger, but was used"
    for key in "efg":
        push(store, key)
    assert keys_of(store) == set("acdefg"), "all of them are waited for"
    push(store, "h")
    assert keys_of(store) == set("cdefgh"), "twice the limit is too much"
    now += 4
    push(store, "c")
    now += 2
    push(store, "b")
    assert keys_of(store) == set("bch"), "what is pushed again is wanted again"


def test_what_is_there_and_pushed_again_is_used_again(store: Store) -> None:
    for key in "abc":
        push(store, key)
    push(store, "a")
    push(store, "d")
    assert keys_of(store) == {"a", "c", "d"}


def test_the_number_of_bundles_is_bounded_as_well() -> None:
    store = Store(max_bytes=10_000, max_bundles=2)
    for key in "abc":
        push(store, key)
    assert keys_of(store) == {"b", "c"}


def test_a_rejected_item_is_forgotten_and_its_neighbours_stay(store: Store) -> None:
    push(store, "a", "b")
    store.hold("r", ["a"])
    store.reject("r", "a")
    store.reject("r", "c")
    assert keys_of(store) == {"b"}
    push(store, "a")
    assert keys_of(store) == {"a", "b"}


def test_an_item_that_another_request_holds_is_not_rejected(store: Store) -> None:
    push(store, "a")
    store.hold("r", ["a"])
    store.hold("s", ["a"])
    store.reject("r", "a")
    assert keys_of(store) == {"a"}


def test_news_are_told_once(store: Store) -> None:
    push(store, "a", "b", num_bytes=30)
    push(store, "c")
    push(store, "c")
    arrivals, evicted = store.take_news()
    assert arrivals == [Arrival(2, 30, 0.5), Arrival(1, 10, 0.5), Arrival(1, 10, 0.5)]
    assert set(evicted) == {"a", "b"}
    assert store.take_news() == ([], [])


def test_what_came_again_before_it_was_told_has_not_gone(store: Store) -> None:
    for key in "abcda":
        push(store, key)
    assert store.take_news()[1] == ["b"]


def test_release_of_an_unknown_request_is_nothing(store: Store) -> None:
    store.release("r")


def test_news_that_nobody_takes_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("easerve.engines.vllm.ec.store.MAX_NEWS", 3)
    for key in "abcdefgh":
        push(store, key)
    assert store.take_news()[1] == ["c", "d", "e"]


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_accounts_right(seed: int) -> None:
    draw = random.Random(seed)
    store = Store(max_bytes=60, max_bundles=5)
    held: dict[str, list[str]] = {}
    told = set[str]()
    for step in range(400):
        match draw.randrange(4):
            case 0 | 1:
                sizes = draw.randrange(1, 30)
                push(store, *draw.choices("abcdefgh", k=draw.randrange(1, 4)), num_bytes=sizes)
            case 2:
                held[str(step)] = draw.choices("abcdefgh", k=draw.randrange(1, 3))
                store.hold(str(step), held[str(step)])
                held[str(step)] = [key for key in held[str(step)] if store.get(key)]
            case 3 if held:
                request = draw.choice(list(held))
                del held[request]
                store.release(request)
        there = keys_of(store)
        assert all(key in there for keys in held.values() for key in keys)
        assert store.num_bytes == sum(memory.num_bytes for memory in memories_of(store))
        told = (told | set(store.take_news()[1])) - there
    for request in held:
        store.release(request)
    assert store.num_bytes <= 60
    assert len(memories_of(store)) <= 5
