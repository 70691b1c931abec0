from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.policy.encoding import Admits, Batch, Candidate, Encoding, Entry, requests_of
from easerve.policy.knobs import Knobs, Order
from easerve.policy.state import Request
from easerve.types import BatchId, MediaItem, Modality, WorkerId

from .scenario import B1, B2, DEFAULTS, E0, E1, P0, P1, picture, request

EDF = replace(DEFAULTS, order=Order.DEADLINE)
BY_SIZE = replace(DEFAULTS, group_by_size=True)
MANY = 1000


def everybody(request: Request) -> bool:
    return True


def only(*names: str) -> Admits:
    return lambda request: request.request_id in names


def encoding_of(*requests: Request, knobs: Knobs = DEFAULTS) -> Encoding:
    """Each request a nanosecond after the one before."""
    encoding = Encoding(knobs)
    for now_ns, each in enumerate(requests):
        add(encoding, each, now_ns)
    return encoding


def add(encoding: Encoding, request: Request, now_ns: int) -> list[bool]:
    """It wants all of its items; those that are new."""
    return [encoding.want(request, index, now_ns) for index in range(len(request.items))]


def offers(
    encoding: Encoding, max_items: int = MANY, max_tokens: int = MANY, admits: Admits = everybody
) -> list[Candidate]:
    return encoding.candidates(max_items, max_tokens, admits)


def keys(entries: Sequence[Entry]) -> str:
    return " ".join(entry.item.key for entry in entries)


def offered(
    encoding: Encoding, max_items: int = MANY, max_tokens: int = MANY, admits: Admits = everybody
) -> list[str]:
    return [keys(each.entries) for each in offers(encoding, max_items, max_tokens, admits)]


def start(
    encoding: Encoding, max_items: int = MANY, encoder_id: WorkerId = E0, max_tokens: int = MANY
) -> tuple[BatchId, Batch]:
    """The first that could go, for ``P0`` unless drawn already."""
    entries = offers(encoding, max_items, max_tokens)[0].entries
    for each in requests_of(entries):
        each.destination = each.destination or P0
    return encoding.start(entries, encoder_id)


def finish(encoding: Encoding, batch_id: BatchId) -> list[str]:
    """The requests that nothing holds back any more by this batch."""
    batch = encoding.take(batch_id)
    assert batch is not None
    return [each.request_id for each in encoding.finished(batch)]


def fail(encoding: Encoding, batch_id: BatchId, num_parts: int = 2) -> None:
    batch = encoding.take(batch_id)
    assert batch is not None
    encoding.put_back(batch, num_parts)


def is_idle(encoding: Encoding) -> bool:
    return not (encoding._entries or encoding._queues or encoding._batches)


# Items that are shared ----------------------------------------------------------------------------


def test_an_item_that_waits_is_encoded_once_for_all_who_want_it() -> None:
    first, second = request("r", "cat", "dog"), request("s", "cat")
    encoding = encoding_of(first, second)
    assert (first.pending, second.pending) == ({0, 1}, {0})
    assert encoding.num_queued == 2
    assert offered(encoding) == ["cat dog"]
    batch_id, batch = start(encoding)
    assert [len(entry.waiters) for entry in batch.entries] == [2, 1]
    assert (first.pending, second.pending) == (set(), set()), "it is on its way"
    assert finish(encoding, batch_id) == []
    assert is_idle(encoding)


def test_only_an_item_that_nobody_wants_yet_is_new() -> None:
    encoding = encoding_of(first := request("r", "cat"))
    assert add(encoding, request("s", "cat", "dog", "dog"), 1) == [False, True, False]
    assert add(encoding, first, 2) == [False]
    assert [len(entry.waiters) for entry in offers(encoding)[0].entries] == [2, 2]


def test_an_item_that_is_under_way_to_elsewhere_is_waited_for() -> None:
    encoding = encoding_of(request("r", "cat"))
    start(encoding)
    add(encoding, later := request("s", "cat", "dog"), 1)
    assert offered(encoding) == ["dog"]
    later.destination = P1
    start(encoding)
    assert later.pending == {0}
    assert finish(encoding, B1) == ["s"]
    assert finish(encoding, B2) == []


def test_an_item_that_is_under_way_to_the_same_place_holds_nobody_back() -> None:
    encoding = encoding_of(first := request("r", "cat"))
    start(encoding)
    later = request("s", "cat")
    later.destination = P0
    add(encoding, later, 1)
    assert later.pending == set()
    assert encoding.coming(later, P0)
    assert not encoding.coming(later, P1)
    encoding.drop(first)
    fail(encoding, B1)
    assert later.pending == {0}, "it is waited for all the same"
    assert not encoding.coming(later, P0)


def test_a_request_may_want_an_item_twice() -> None:
    encoding = encoding_of(twice := request("r", "cat", "cat"))
    assert (encoding.num_queued, twice.pending) == (1, {0, 1})
    start(encoding)
    assert twice.pending == set()
    finish(encoding, B1)
    assert is_idle(encoding)


def test_what_an_encoder_has_is_sent_without_the_queue() -> None:
    encoding, asks = encoding_of(), request("r", "cat", "dog", "cat", "owl")
    asks.destination = P0
    batch_id, batch = encoding.send(asks, [0, 1, 2], E0, 1)
    assert (keys(batch.entries), batch.forward, encoding.num_queued) == ("cat dog", False, 0)
    assert (asks.sent, asks.pending) == ({0, 1, 2}, set())
    assert encoding.has("cat")
    assert not encoding.has("owl")
    fail(encoding, batch_id)
    assert offered(encoding) == ["cat", "dog"]
    assert asks.pending == {0, 1, 2}


def test_everybody_who_waits_is_named_as_often_as_they_do() -> None:
    encoding = encoding_of(request("r", "cat", "dog"), request("s", "cat"))
    assert [each.request_id for each in encoding.waiting()] == ["r", "s", "r"]
    _, batch = start(encoding)
    assert list(encoding.waiting()) == []
    assert [each.request_id for each in requests_of(batch.entries)] == ["r", "s"]


# Requests that end --------------------------------------------------------------------------------


def test_a_queued_item_goes_with_the_last_who_waits_for_it() -> None:
    first, second = request("r", "cat"), request("s", "cat")
    encoding = encoding_of(first, second)
    assert encoding.drop(first) == []
    assert offered(encoding) == ["cat"]
    assert encoding.drop(second) == []
    assert is_idle(encoding)


def test_a_batch_that_nobody_waits_for_is_forgotten() -> None:
    only = request("r", "cat", "dog")
    encoding = encoding_of(only)
    batch_id, batch = start(encoding)
    assert encoding.drop(only) == [(batch_id, batch)]
    assert is_idle(encoding)
    assert encoding.take(batch_id) is None


def test_a_batch_goes_on_for_those_who_still_wait() -> None:
    leaves, stays = request("r", "cat"), request("s", "dog")
    encoding = encoding_of(leaves, stays)
    start(encoding)
    assert encoding.drop(leaves) == []
    add(encoding, request("t", "cat"), 1)
    assert offered(encoding) == [], "it is still being encoded"
    assert finish(encoding, B1) == ["t"]
    assert is_idle(encoding)


def test_what_nobody_waits_for_is_not_encoded_again() -> None:
    leaves, stays = request("r", "cat"), request("s", "dog")
    encoding = encoding_of(leaves, stays)
    start(encoding)
    encoding.drop(leaves)
    fail(encoding, B1)
    assert offered(encoding) == ["dog"]
    encoding.drop(stays)
    assert is_idle(encoding)


def test_a_request_that_fails_with_its_batch_leaves_nothing() -> None:
    fails, stays = request("r", "cat", "dog"), request("s", "dog")
    encoding = encoding_of(fails, stays)
    start(encoding)
    batch = encoding.take(B1)
    assert batch is not None
    assert encoding.drop(fails) == []
    encoding.put_back(batch, 2)
    assert offered(encoding) == ["dog"]


def test_the_batches_of_a_lost_encoder_are_forgotten() -> None:
    encoding = encoding_of(request("r", "cat", "dog"))
    for worker_id in (E0, E1):
        start(encoding, 1, worker_id)
    assert [keys(batch.entries) for batch in encoding.lost(E0)] == ["cat"]
    assert encoding.lost(E0) == []
    assert encoding.take(B2) is not None


# Kinds and their order ----------------------------------------------------------------------------


def test_modalities_do_not_share_a_batch() -> None:
    sound = MediaItem("bark", Modality.AUDIO, 30)
    assert offered(encoding_of(request("r", "cat", sound, "dog"))) == ["cat dog", "bark"]


def test_sizes_share_a_batch_unless_they_are_grouped() -> None:
    asked = request("r", picture("small", 10), picture("large", 90), picture("tiny", 10))
    assert offered(encoding_of(asked)) == ["small large tiny"]
    assert offered(encoding_of(asked, knobs=BY_SIZE)) == ["small tiny", "large"]


def test_the_batch_with_the_first_item_is_first() -> None:
    odd, others = request("odd", picture("odd", 90)), request("r", "a", "b", "c", "d")
    encoding = encoding_of(others, odd, request("s", "e", "f"), knobs=BY_SIZE)
    assert offered(encoding, max_items=2) == ["a b", "odd"]
    start(encoding, max_items=2)
    start(encoding, max_items=2)
    assert offered(encoding, max_items=2) == ["odd", "e f"]


def test_the_earliest_deadline_is_first_if_so_ordered() -> None:
    late, early = request("late", "a", received_ns=9), request("early", "b", received_ns=3)
    assert offered(encoding_of(late, early)) == ["a b"]
    assert offered(encoding_of(late, early, knobs=EDF)) == ["b a"]
    assert offered(encoding_of(late, early, knobs=replace(EDF, ttft_slo_s=1.0))) == ["b a"]


def test_an_item_is_as_urgent_as_the_most_urgent_who_waits_for_it() -> None:
    others = [
        request(key, key, received_ns=received_ns) for received_ns, key in enumerate("abc", 5)
    ]
    urgent = request("t", "b", received_ns=1)
    encoding = encoding_of(*others, knobs=EDF)
    add(encoding, urgent, 9)
    assert offered(encoding) == ["b a c"]
    encoding.drop(urgent)
    assert offered(encoding) == ["a b c"]


def test_other_knobs_queue_everything_anew() -> None:
    encoding = encoding_of(
        request("r", picture("large", 90), received_ns=9),
        request("s", picture("small", 10), received_ns=3),
    )
    assert offered(encoding) == ["large small"]
    encoding.retune(replace(EDF, group_by_size=True))
    assert offered(encoding) == ["small", "large"]
    encoding.retune(EDF)
    assert offered(encoding) == ["small large"]
    encoding.retune(DEFAULTS)
    assert offered(encoding) == ["large small"]


KINDS = [picture("", 10), picture("", 20), MediaItem("", Modality.AUDIO, 10)]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(10, 60),
)
def test_no_item_is_overtaken_by_one_of_its_kind_nor_the_first_by_any(
    kinds: list[MediaItem], max_items: int, max_tokens: int
) -> None:
    items = [replace(kind, key=f"{number:02}") for number, kind in enumerate(kinds)]
    encoding = encoding_of(*(request(item.key, item) for item in items), knobs=BY_SIZE)
    left = [item.key for item in items]
    gone: list[MediaItem] = []
    while left:
        first = offers(encoding, max_items, max_tokens)[0]
        assert first.entries[0].item.key == left[0]
        gone += [entry.item for entry in first.entries]
        left = [key for key in left if key not in {entry.item.key for entry in first.entries}]
        start(encoding, max_items, max_tokens=max_tokens)
    for kind in KINDS:
        of_kind = [item.key for item in gone if replace(item, key="") == kind]
        assert of_kind == sorted(of_kind)


# How much fits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_items", "max_items", "max_tokens", "taken", "room"),
    [
        (3, 4, 1000, 3, 1),
        (4, 4, 1000, 4, 0),
        (5, 4, 1000, 4, 0),
        (3, 9, 100, 3, 0),
        (3, 9, 120, 3, 1),
        (4, 9, 100, 3, 0),
        (1, 9, 10, 1, -1),
        (2, 9, 10, 1, 0),
        (1, 1, 1000, 1, 0),
    ],
)
def test_a_batch_is_full_by_items_or_by_tokens(
    num_items: int, max_items: int, max_tokens: int, taken: int, room: int
) -> None:
    encoding = encoding_of(request("r", *(str(index) for index in range(num_items))))
    (candidate,) = offers(encoding, max_items, max_tokens)
    assert (len(candidate.entries), candidate.room) == (taken, room)
    assert candidate.full == (room <= 0)
    assert candidate.num_queued == num_items


def test_an_item_that_is_larger_than_a_call_goes_alone() -> None:
    encoding = encoding_of(request("r", picture("huge", 500), "small"))
    assert offered(encoding, max_tokens=100) == ["huge"]
    encoding = encoding_of(request("r", "small", picture("huge", 500)))
    assert offered(encoding, max_tokens=100) == ["small"]


# The gate -----------------------------------------------------------------------------------------


def test_only_items_of_requests_that_are_admitted_go() -> None:
    encoding = encoding_of(request("r", "a"), request("s", "b", "c"), request("t", "d"))
    assert offered(encoding, admits=only("s", "t")) == ["b c d"]
    assert offered(encoding, admits=only()) == []


def test_an_item_that_several_wait_for_goes_as_soon_as_one_of_them_may() -> None:
    encoding = encoding_of(request("r", "cat", "dog"), request("s", "cat"))
    assert offered(encoding, admits=only("s")) == ["cat"]


def test_a_kind_of_which_none_is_admitted_is_not_offered() -> None:
    encoding = encoding_of(request("r", picture("large", 90)), request("s", "small"), knobs=BY_SIZE)
    assert offered(encoding, admits=only("s")) == ["small"]


def test_a_batch_is_not_full_by_items_that_may_not_go() -> None:
    encoding = encoding_of(request("r", "a", "b"), request("s", "c", "d"))
    (candidate,) = offers(encoding, max_items=3, admits=only("s"))
    assert (candidate.room, candidate.num_queued) == (1, 4)


# Batches that fail --------------------------------------------------------------------------------


def test_a_batch_that_failed_is_halved_until_the_item_at_fault_is_alone() -> None:
    names = [str(index) for index in range(8)]
    encoding = encoding_of(*(request(name, name) for name in names))
    tried = []
    good: list[str] = []
    while encoding.num_queued:
        batch_id, batch = start(encoding)
        tried.append(keys(batch.entries))
        if "5" not in tried[-1]:
            good += tried[-1].split()
            finish(encoding, batch_id)
        elif len(batch.entries) > 1:
            fail(encoding, batch_id)
        else:
            encoding.take(batch_id)
            encoding.drop(requests_of(batch.entries)[0])
    assert tried == ["0 1 2 3 4 5 6 7", "0 1 2 3", "4 5 6 7", "4 5", "4", "5", "6 7"]
    assert sorted(good) == [name for name in names if name != "5"]
    assert is_idle(encoding)


def test_suspects_get_no_company_and_wait_for_none() -> None:
    encoding = encoding_of(request("r", "a", "b", "c"))
    start(encoding)
    add(encoding, request("s", "d"), 1)
    fail(encoding, B1)
    assert offered(encoding) == ["a b", "c", "d"]
    assert [each.full for each in offers(encoding)] == [True, True, False]
    assert [each.may_run_ahead for each in offers(encoding, max_items=1)] == [False, False, True]


def test_items_that_are_tried_again_keep_their_place() -> None:
    encoding = encoding_of(request("r", "a"), request("s", "b"))
    start(encoding, max_items=1)
    fail(encoding, B1, num_parts=1)
    assert offered(encoding) == ["a b"], "alone, its fault would be known"


def test_a_batch_may_be_put_back_item_by_item() -> None:
    encoding = encoding_of(request("r", "a", "b", "c"))
    start(encoding)
    fail(encoding, B1, num_parts=3)
    assert offered(encoding) == ["a", "b", "c"]


def test_nothing_is_put_back_for_nobody() -> None:
    only = request("r", "a", "b")
    encoding = encoding_of(only)
    start(encoding)
    batch = encoding.take(B1)
    assert batch is not None
    encoding.drop(only)
    encoding.put_back(batch, 2)
    assert is_idle(encoding)


def test_one_who_joins_a_suspect_waits_with_it() -> None:
    encoding = encoding_of(request("r", "a", "b"))
    start(encoding)
    fail(encoding, B1)
    add(encoding, request("s", "b"), 1)
    assert offered(encoding) == ["a", "b"]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 20), st.sets(st.integers(0, 19), max_size=3))
def test_only_items_at_fault_are_found_at_fault(num_items: int, poisoned: set[int]) -> None:
    encoding = encoding_of(*(request(str(index), str(index)) for index in range(num_items)))
    guilty = set()
    num_calls = 0
    while encoding.num_queued:
        num_calls += 1
        batch_id, batch = start(encoding)
        found = {int(entry.item.key) for entry in batch.entries}
        if not found & poisoned:
            finish(encoding, batch_id)
        elif len(found) > 1:
            fail(encoding, batch_id)
        else:
            guilty |= found
            encoding.take(batch_id)
            encoding.drop(requests_of(batch.entries)[0])
    assert guilty == poisoned & set(range(num_items))
    assert num_calls <= 1 + 2 * 5 * len(guilty), "halving takes two calls a level"
