from collections.abc import Sequence
from typing import Any

import pytest

from easerve.engines.vllm.ec.outbox import Embedding
from easerve.engines.vllm.ec.producer import (
    HostCopies,
    ProducerScheduler,
    ProducerWorker,
    Want,
    Wants,
    destinations_of,
)

from .requests import ended, request

torch = pytest.importorskip("torch")
P0, P1 = "prefill-0", "local-prefill-0"


class FakeOutbox:
    def __init__(self) -> None:
        self.pushed: list[tuple[str, list[str]]] = []

    def push(self, destination: str, embeddings: Sequence[Embedding], sent_ns: int) -> bool:
        assert sent_ns > 0
        self.pushed.append((destination, [embedding.key for embedding in embeddings]))
        return True

    def close(self) -> None:
        self.pushed.append(("closed", []))


class Encoder:
    """Both halves, and an encoder cache between them."""

    def __init__(self) -> None:
        self.scheduler, self.outbox = ProducerScheduler(), FakeOutbox()
        outbox: Any = self.outbox
        self.worker, self.cache = ProducerWorker(outbox), dict[str, Any]()

    def step(
        self, *encoded: str, freed: Sequence[str] = (), finished: Sequence[str] = ()
    ) -> list[tuple[str, list[str]]]:
        """Encode these; what was pushed."""
        for key in encoded:
            self.scheduler.allocate(key)
        step = self.scheduler.end_step(freed)
        for key in freed:
            self.cache.pop(key, None)
        self.worker.begin_step(step, self.cache)
        for key in encoded:
            self.cache[key] = torch.zeros(2, 3)
            self.worker.save(key, self.cache[key])
        self.outbox.pushed.clear()
        self.worker.end_step(set(finished))
        return list(self.outbox.pushed)


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


# Who wants what -------------------------------------------------------------------------------


def test_destinations_go_by_item() -> None:
    wanted = request("r", "a", "b", destinations=[[P0], [P0, P1]])
    assert destinations_of(wanted) == [(P0,), (P0, P1)]


def test_an_engine_on_another_host_goes_by_its_address() -> None:
    wanted = request("r", "a", destinations=[["tcp://10.0.0.5:7000"]])
    assert destinations_of(wanted) == [("tcp://10.0.0.5:7000",)]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"destinations": None},
        {"destinations": "ab"},
        {"destinations": [[P0]]},
        {"destinations": [P0, P1]},
        {"destinations": [[P0], [5]]},
        {"destinations": [[P0], ["../x"]]},
    ],
)
def test_destinations_in_another_form_are_none(params: dict[str, Any]) -> None:
    assert destinations_of(request("r", "a", "b", **params)) == []


def test_a_request_is_noted_once(encoder: Encoder) -> None:
    wanted = request("r", "a", "b", destinations=[[P0], []])
    encoder.scheduler.note(wanted)
    encoder.scheduler.note(wanted)
    assert encoder.scheduler.end_step([]) == Wants([Want("r", "a", (P0,))])
    encoder.scheduler.note(wanted)
    assert encoder.scheduler.end_step([]) == Wants()


# What is pushed -------------------------------------------------------------------------------


def test_a_step_pushes_one_bundle_to_each_destination(encoder: Encoder) -> None:
    encoder.scheduler.note(request("r", "a", "b", "c", destinations=[[P0], [P0, P1], []]))
    assert encoder.step("a", "b", "c") == [(P0, ["a", "b"]), (P1, ["b"])]
    assert encoder.step() == []


def test_what_the_cache_has_is_pushed_without_being_made(encoder: Encoder) -> None:
    encoder.step("a")
    encoder.scheduler.note(request("r", "a", "b", destinations=[[P0], [P0]]))
    assert encoder.step("b") == [(P0, ["a", "b"])]


def test_an_item_that_goes_and_is_made_anew_in_one_step_is_pushed_once(encoder: Encoder) -> None:
    encoder.step("a")
    encoder.scheduler.note(request("r", "a", destinations=[[P0]]))
    assert encoder.step("a", freed=["a"]) == [(P0, ["a"])]


def test_an_item_that_several_requests_want_goes_to_all_they_name(encoder: Encoder) -> None:
    encoder.scheduler.note(request("r", "a", destinations=[[P0]]))
    encoder.scheduler.note(request("s", "a", destinations=[[P0, P1]]))
    assert encoder.step("a") == [(P0, ["a"]), (P1, ["a"])]


def test_an_item_named_twice_in_a_request_is_one_of_its_bundle(encoder: Encoder) -> None:
    encoder.scheduler.note(request("r", "a", "a", destinations=[[P0], [P0]]))
    assert encoder.step("a") == [(P0, ["a"])]


def test_an_item_may_be_made_in_a_later_step(encoder: Encoder) -> None:
    encoder.scheduler.note(request("r", "a", "b", destinations=[[P0], [P0]]))
    assert encoder.step("a") == [(P0, ["a"])]
    assert encoder.step("b") == [(P0, ["b"])]


def test_what_an_aborted_request_wanted_is_forgotten(encoder: Encoder) -> None:
    encoder.scheduler.note(request("r", "a", destinations=[[P0]]))
    encoder.scheduler.note(request("s", "a", destinations=[[P1]]))
    assert encoder.step() == []
    assert encoder.step(finished=["r"]) == []
    assert encoder.step("a") == [(P1, ["a"])]
    encoder.scheduler.note(request("t", "b", destinations=[[P0]]))
    encoder.step()
    encoder.step(finished=["t"])
    assert encoder.step("b") == []


def test_a_request_that_ends_in_its_step_has_been_served(encoder: Encoder) -> None:
    encoder.scheduler.note(request("r", "a", destinations=[[P0]]))
    assert encoder.step("a", finished=["r"]) == [(P0, ["a"])]


def test_embeddings_on_the_host_are_their_bytes() -> None:
    values = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
    step = HostCopies({"a": values[::2], "b": values.float().requires_grad_()})
    one, other = step.embedding("a"), step.embedding("b")
    assert (one.shape, one.dtype, other.dtype) == ((2, 3), "bfloat16", "float32")
    assert one.content() == values[::2].contiguous().view(torch.uint8).numpy().tobytes()
    assert other.content().nbytes == 48


def test_the_outbox_is_closed(encoder: Encoder) -> None:
    encoder.worker.close()
    assert encoder.outbox.pushed == [("closed", [])]


# What is told ---------------------------------------------------------------------------------


def test_the_reply_has_the_items_and_what_went(encoder: Encoder) -> None:
    encoder.step(freed=["a", "b"])
    encoder.step(freed=["c"])
    metadata: dict[str, Any] = {"k": {"metadata": {}}}
    assert encoder.scheduler.finish(ended(request("r", "k")), metadata) == {
        "items": metadata,
        "evicted": ["a", "b", "c"],
    }
    assert encoder.scheduler.finish(ended(request("s", "k")), metadata) == {"items": metadata}
    assert encoder.scheduler.finish(ended(request("t")), {}) is None


def test_what_is_made_anew_has_not_gone(encoder: Encoder) -> None:
    encoder.step("a", freed=["a", "b"])
    encoder.step("b")
    assert encoder.scheduler.finish(ended(request("r")), {}) is None


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
def test_nothing_is_told_where_nobody_reads(encoder: Encoder, status: str) -> None:
    encoder.step(freed=["a"])
    assert encoder.scheduler.finish(ended(request("r"), status), {}) is None
    assert encoder.scheduler.finish(ended(request("s")), {}) == {"evicted": ["a"]}


def test_a_name_may_be_used_again(encoder: Encoder) -> None:
    wanted = request("r", "a", destinations=[[P0]])
    encoder.scheduler.note(wanted)
    encoder.step("a")
    encoder.scheduler.finish(ended(wanted), {})
    encoder.scheduler.note(wanted)
    assert encoder.step() == [(P0, ["a"])]
