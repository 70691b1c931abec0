"""The modelled encoder: host work, forwards one after another, calls that share one."""

from collections.abc import Iterable
from functools import partial

import pytest

from easerve.costs.base import Media
from easerve.costs.linear import LinearCosts
from easerve.sim.clock import Effect, Handler
from easerve.sim.encoder import Call, EncodeEngine, EncodeLimits
from easerve.sim.run import Run
from easerve.sim.sharing import Own
from easerve.types import Modality, Stage

from .play import Notes, play

COSTS = LinearCosts(encode_base_s=1.0, encode_token_s=0.1)


class Encoder:
    """An encoder, and when its calls were done."""

    def __init__(self, limits: EncodeLimits | None = None, part: float = 1.0) -> None:
        self.run = Run(traced=True)
        limits = limits or EncodeLimits()
        self.engine = EncodeEngine("e0", COSTS, Own(), limits, self.run, lambda: part)
        self.done = Notes()
        self.calls: dict[str, Call] = {}

    def call(self, name: str, *tokens: int) -> Handler:
        items = [Media(Modality.IMAGE, each) for each in tokens]
        self.calls[name] = Call(items, self.done.note(name))
        return partial(self.engine.submit, self.calls[name])

    def drop(self, name: str, now_ns: int) -> Iterable[Effect]:
        self.engine.drop(self.calls[name])
        return ()

    @property
    def forwards(self) -> list[int]:
        """Items of each."""
        return [span.args["items"] for span in self.run.spans if span.kind == "encode"]


def test_a_call_is_a_forward() -> None:
    encoder = Encoder()
    play((1.0, encoder.call("a", 10, 20)))
    assert encoder.done == {"a": 1.0 + 1.0 + 3.0}
    assert encoder.run.busy_s == {"e0": 4.0}
    assert encoder.run.stages == {"e0": Stage.ENCODE}
    assert encoder.run.mean_batch == 2
    assert encoder.engine.num_items == 0


def test_forwards_come_one_after_another() -> None:
    encoder = Encoder()
    play((0.0, encoder.call("a", 10)), (0.5, encoder.call("b", 10)), (1.0, encoder.call("c", 10)))
    assert encoder.done == {"a": 2.0, "b": 4.0, "c": 6.0}


def test_a_part_of_the_device_makes_it_longer() -> None:
    encoder = Encoder(part=0.5)
    play((0.0, encoder.call("a", 10)))
    assert encoder.done == {"a": 4.0}


def test_dispatch_keeps_the_device_waiting() -> None:
    encoder = Encoder(EncodeLimits(dispatch_s=0.25))
    play((0.0, encoder.call("a", 10)), (0.0, encoder.call("b", 10)))
    assert encoder.done == {"a": 2.25, "b": 4.5}
    assert encoder.run.busy_s == {"e0": 4.5}


@pytest.mark.parametrize(("workers", "ready_s"), [(1, (1.0, 2.0, 3.0)), (2, (1.0, 1.0, 2.0))])
def test_items_are_processed_before_the_forward_by_so_many_workers(
    workers: int, ready_s: tuple[float, ...]
) -> None:
    encoder = Encoder(EncodeLimits(item_s=1.0, host_workers=workers))
    play(*((0.0, encoder.call(name, 0)) for name in "abc"))
    ends_s: list[float] = []
    for each in ready_s:
        ends_s.append(max(each, *ends_s, 0.0) + 1.0)
    assert [encoder.done[name] for name in "abc"] == ends_s
    waits = [span for span in encoder.run.spans if span.kind == "preprocess"]
    assert sorted(span.end_ns / 1e9 for span in waits) == list(ready_s)


def test_calls_that_wait_share_a_forward_as_far_as_it_holds_them() -> None:
    encoder = Encoder(EncodeLimits(merge_items=3, merge_tokens=50))
    calls = [("a", 10), ("b", 10), ("c", 10), ("d", 40), ("e", 10), ("f", 10)]
    play(*((0.0, encoder.call(name, tokens)) for name, tokens in calls))
    assert encoder.forwards == [1, 2, 2, 1]  # d is too large for b and c, f for d and e
    assert encoder.done["b"] == encoder.done["c"] == 2.0 + 3.0


def test_a_call_larger_than_what_merges_goes_alone() -> None:
    encoder = Encoder(EncodeLimits(merge_items=2, merge_tokens=5))
    play(*((0.0, encoder.call(name, 10, 10, 10)) for name in "ab"))
    assert encoder.forwards == [3, 3]


def test_a_call_that_waits_is_dropped_and_one_that_runs_goes_on() -> None:
    encoder = Encoder(EncodeLimits(item_s=0.1))
    play(
        (0.0, encoder.call("a", 10)),
        (0.0, encoder.call("b", 10)),
        (0.0, encoder.call("c", 10)),
        (0.05, partial(encoder.drop, "c")),  # in preparation
        (1.0, partial(encoder.drop, "b")),
        (1.0, partial(encoder.drop, "a")),
    )
    assert encoder.done == {"a": 2.1}
    assert encoder.engine.num_items == 0
    assert encoder.run.num_calls == 1


def test_drop_says_whether_it_runs() -> None:
    encoder = Encoder()
    play((0.0, encoder.call("a", 10)), (0.0, encoder.call("b", 10)))
    running = Encoder()
    said: list[bool] = []

    def drops(now_ns: int) -> Iterable[Effect]:
        said.extend(running.engine.drop(running.calls[name]) for name in "ab")
        return ()

    play((0.0, running.call("a", 10)), (0.0, running.call("b", 10)), (1.0, drops))
    assert said == [True, False]


@pytest.mark.parametrize("at_s", [0.05, 1.0, 2.1])
def test_it_forgets_all_when_it_dies(at_s: float) -> None:
    """In preparation, running, and as it ends."""
    encoder = Encoder(EncodeLimits(item_s=0.1))
    play(
        (at_s, encoder.engine.reset),
        (0.0, encoder.call("a", 10)),
        (0.0, encoder.call("b", 10)),
        (5.0, encoder.call("c", 10)),
    )
    assert encoder.done == {"c": 7.1}
    assert encoder.engine.num_items == 0
