"""What moves between modelled engines: embeddings and KV caches, and what is lost on the way."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest

from easerve.costs.base import Media
from easerve.policy.partition import ALL, SHARED, Demand, Layout
from easerve.sim.clock import Effect, Handler
from easerve.sim.encoder import Call, EncodeEngine, EncodeLimits
from easerve.sim.fleet import Entry, Fleet
from easerve.sim.llm import LlmEngine, LlmLimits
from easerve.sim.run import Run
from easerve.sim.sharing import Colocated, Own
from easerve.types import Modality, Stage, WorkerId

from .modelled import Costs
from .play import Notes, play

E0, E1, P0, L0, D0 = map(WorkerId, ("e0", "e1", "p0", "l0", "d0"))
# A forward 1 s, a prompt 10 s, a token 0.1 s; a token's way elsewhere 1 ms.
COSTS = Costs(1.0, 0.0, 10.0, 0.0, 0.1, 0.0, 0.001)
TOKENS = 100
TRANSFER_S = 0.1
BLOCKS = 100


class Moves:
    """A fleet in which e0 has l0 beside it, and what happens there."""

    def __init__(self, encode: EncodeLimits | None = None, kv_tokens: int = 16 * BLOCKS) -> None:
        self.run, self.notes = Run(traced=True), Notes()
        self.device = Colocated(Layout(10), "l0", 0.0)
        holds = LlmLimits(kv_tokens, chunked=False, max_prompts=1, holds=True)
        encoders = [
            EncodeEngine(name, COSTS, device, encode or EncodeLimits(), self.run)
            for name, device in (("e0", self.device), ("e1", Own()))
        ]
        prefills = [
            LlmEngine("p0", Stage.PREFILL, COSTS, Own(), holds, self.run),
            LlmEngine(
                "l0", Stage.PREFILL, COSTS, self.device, holds, self.run, self.device.prefill_part
            ),
        ]
        self.device.wake = prefills[1].wake
        decodes = [LlmEngine("d0", Stage.DECODE, COSTS, Own(), LlmLimits(kv_tokens), self.run)]
        beside, near = {E0: self.device}, {E0: frozenset({L0})}
        self.fleet = Fleet(COSTS, self.run, encoders, prefills, decodes, beside, near)
        self.calls: dict[str, Call] = {}
        self.waits_s: dict[str, float] = {}
        self.missing: dict[str, tuple[str, ...]] = {}

    def encode(
        self, name: str, encoder: WorkerId, keys: str, *to: WorkerId, demand: Demand = SHARED
    ) -> Handler:
        """``keys``: a letter for each item."""

        def handler(now_ns: int) -> Iterable[Effect]:
            entries = [Entry(key, Media(Modality.IMAGE, TOKENS), to) for key in keys]
            done = self.notes.note(name)
            self.calls[name], effects = self.fleet.encode(encoder, entries, demand, done, now_ns)
            return effects

        return handler

    def drop(self, name: str, encoder: WorkerId) -> Handler:
        return lambda now_ns: self.fleet.drop(encoder, self.calls[name], now_ns)

    def prefill(
        self,
        name: str,
        engine: WorkerId,
        keys: str = "",
        final: bool = False,
        num_tokens: int = TOKENS,
    ) -> Handler:
        def finished(wait_s: float, now_ns: int) -> Iterable[Effect]:
            self.waits_s[name] = wait_s
            return self.notes.note(name)(now_ns)

        def failed(missing: tuple[str, ...], now_ns: int) -> Iterable[Effect]:
            self.missing[name] = missing
            return self.notes.note(f"{name} failed")(now_ns)

        return lambda now_ns: self.fleet.prefill(
            engine, name, num_tokens, keys, finished, failed, now_ns, final=final
        )

    def decode(self, name: str, source: WorkerId, num_tokens: int = 3) -> Handler:
        note = self.notes.note

        def failed(retryable: bool, now_ns: int) -> Iterable[Effect]:
            return note(f"{name} failed" if retryable else f"{name} refused")(now_ns)

        return lambda now_ns: self.fleet.decode(
            D0,
            name,
            source,
            TOKENS,
            num_tokens,
            note(f"{name} first"),
            note(f"{name} decoded"),
            failed,
            now_ns,
        )

    def lose(self, engine: WorkerId) -> Handler:
        return partial(self.fleet.lose, engine)

    def abort(self, name: str, engine: WorkerId) -> Handler:
        return partial(self.fleet.abort, engine, name)

    def held(self) -> list[int]:
        """KV blocks of prefill and decode engines that are taken."""
        engines = (self.fleet.prefills | self.fleet.decodes).values()
        return [each.limits.num_blocks - each.num_free_blocks for each in engines]

    def transfers(self) -> list[tuple[Any, ...]]:
        return [
            (span.args["to"], span.begin_ns / 1e9, span.end_ns / 1e9)
            for span in self.run.spans
            if span.kind == "transfer" and span.engine[0] == "e"
        ]


# Embeddings ---------------------------------------------------------------------------------------


def test_a_prefill_begins_when_its_last_embedding_is_there() -> None:
    moves = Moves()
    play(
        (0.0, moves.prefill("r", P0, "ab")),
        (0.5, moves.encode("one", E0, "a", P0)),
        (2.0, moves.encode("two", E1, "b", P0)),
    )
    arrived_s = 3.0 + TRANSFER_S
    assert moves.notes == pytest.approx({"one": 1.5, "two": 3.0, "r": arrived_s + 10})
    assert moves.waits_s == {"r": pytest.approx(arrived_s)}


def test_an_engine_that_has_them_begins_at_once() -> None:
    moves = Moves()
    play((0.0, moves.encode("call", E0, "ab", P0)), (5.0, moves.prefill("r", P0, "ab")))
    assert moves.notes["r"] == 15.0
    assert moves.waits_s == {"r": 0.0}


def test_a_neighbour_has_them_at_once_and_others_get_bundles_one_after_another() -> None:
    moves = Moves()
    play((0.0, moves.encode("one", E0, "ab", P0, L0)), (0.0, moves.encode("two", E0, "c", P0)))
    assert moves.transfers() == [
        ("p0", 1.0, pytest.approx(1.0 + 2 * TRANSFER_S)),
        ("p0", 2.0, pytest.approx(2.0 + TRANSFER_S)),
    ]
    assert moves.fleet.missing(L0, "abc") == ("c",)
    assert moves.fleet.missing(P0, "abc") == ()


def test_bundles_share_the_link_of_their_encoder() -> None:
    moves = Moves()
    play((0.0, moves.encode("one", E1, "ab", P0, L0)))
    assert moves.transfers() == [
        ("p0", 1.0, pytest.approx(1.0 + 2 * TRANSFER_S)),
        ("l0", pytest.approx(1.0 + 2 * TRANSFER_S), pytest.approx(1.0 + 4 * TRANSFER_S)),
    ]


def test_what_an_encoder_has_is_only_sent() -> None:
    moves = Moves()
    play(
        (0.0, moves.encode("first", E0, "ab", P0)),
        (5.0, moves.encode("again", E0, "ab", L0)),
        (5.0, moves.encode("some", E0, "bc", L0)),
    )
    assert moves.notes == {"first": 1.0, "again": 5.0, "some": 6.0}
    assert (moves.run.num_calls, moves.run.num_items) == (2, 3)
    assert moves.fleet.missing(L0, "abc") == ()


def test_what_is_on_its_way_is_not_missing() -> None:
    moves, missing = Moves(), dict[float, tuple[str, ...]]()

    def look(now_ns: int) -> Iterator[Effect]:
        missing[now_ns / 1e9] = moves.fleet.missing(P0, "ab")
        yield from ()

    times_s = (0.5, 1.0 + TRANSFER_S / 2, 2.0)
    play((0.0, moves.encode("call", E0, "a", P0)), *((at_s, look) for at_s in times_s))
    assert list(missing.values()) == [("a", "b"), ("b",), ("b",)]


def test_embeddings_do_not_outlive_the_engine_that_they_were_sent_to() -> None:
    moves, missing = Moves(), list[str]()

    def look(now_ns: int) -> Iterator[Effect]:
        missing.extend(moves.fleet.missing(P0, "ab"))
        yield from ()

    play(
        (0.0, moves.encode("call", E0, "ab", P0)),
        (1.0 + TRANSFER_S, moves.lose(P0)),  # under way
        (2.0, look),
        (3.0, moves.prefill("r", P0, "ab")),
        (9.0, moves.encode("again", E0, "ab", P0)),
    )
    assert missing == ["a", "b"]
    assert moves.notes == pytest.approx({"call": 1.0, "again": 9.0, "r": 19.0 + 2 * TRANSFER_S})


# A divided device ---------------------------------------------------------------------------------


def test_a_call_demands_its_part_from_when_it_comes_until_it_is_encoded() -> None:
    moves, parts = Moves(EncodeLimits(item_s=2.0)), dict[float, float]()

    def look(now_ns: int) -> Iterator[Effect]:
        parts[now_ns / 1e9] = moves.device.prefill_part()
        yield from ()

    call = moves.encode("call", E0, "a", L0, demand=Demand(4, False, ""))
    play((1.0, call), *((at_s, look) for at_s in (0.5, 1.5, 3.5, 4.5)))
    assert parts == {0.5: 1.0, 1.5: 0.6, 3.5: 0.6, 4.5: 1.0}


@pytest.mark.parametrize(("at_s", "opens_s"), [(0.5, 2.0), (2.5, 2.5), (3.5, 4.0)])
def test_a_call_that_is_dropped_demands_nothing_unless_it_runs(at_s: float, opens_s: float) -> None:
    """A first call runs from 1 to 2 s, the one in question behind it, or from 3 to 4 s alone."""
    gate = Demand(ALL, False, "")
    moves = Moves(EncodeLimits(item_s=1.0))
    first = [(0.0, moves.encode("first", E0, "a", L0, demand=gate))] if at_s < 1 else []
    begin_s = 0.1 if first else 2.0
    play(
        *first,
        (begin_s, moves.encode("call", E0, "b", L0, demand=gate)),
        (begin_s, moves.prefill("r", L0)),
        (at_s, moves.drop("call", E0)),
    )
    assert moves.notes["r"] == opens_s + 10
    assert ("call" in moves.notes) == (at_s == 3.5)


def test_what_stands_is_kept_until_another_is_said_or_the_encoder_dies() -> None:
    moves = Moves()
    moves.fleet.divide(E0, Demand(ALL, True, ""))
    moves.fleet.divide(E1, Demand(ALL, True, ""))  # which shares nothing
    play((0.0, moves.prefill("r", L0)), (3.0, moves.lose(E0)))
    assert moves.notes == {"r": 13.0}


# KV caches ----------------------------------------------------------------------------------------


def test_a_cache_is_held_until_it_has_been_pulled() -> None:
    moves, held = Moves(), dict[float, list[int]]()

    def look(now_ns: int) -> Iterator[Effect]:
        held[now_ns / 1e9] = moves.held()
        yield from ()

    play(
        (0.0, moves.prefill("r", P0)),
        (12.0, moves.decode("r", P0)),
        *((at_s, look) for at_s in (11.0, 12.0 + TRANSFER_S / 2, 12.15, 13.0)),
    )
    assert moves.notes == pytest.approx({"r": 10.0, "r first": 12.2, "r decoded": 12.4})
    assert list(held.values()) == [[7, 0, 0], [7, 0, 7], [0, 0, 7], [0, 0, 0]]


def test_a_decode_that_finds_no_room_keeps_the_cache_where_it_is() -> None:
    """Seven blocks each: d0 has room for one of them."""
    moves = Moves(kv_tokens=16 * 8)
    play(
        (0.0, moves.prefill("a", P0)),
        (0.0, moves.prefill("b", L0)),
        (20.0, moves.decode("a", P0, 10)),
        (20.0, moves.decode("b", L0, 10)),
        (20.0, moves.prefill("c", L0, final=True)),
    )
    decoded_s = 20.0 + TRANSFER_S + 1.0
    assert moves.notes["a decoded"] == pytest.approx(decoded_s)
    assert moves.notes["b first"] == pytest.approx(decoded_s + TRANSFER_S + 0.1)
    assert moves.notes["c"] == pytest.approx(decoded_s + TRANSFER_S + 10)  # it waits for blocks
    assert moves.held() == [0, 0, 0]


def test_the_cache_of_a_whole_answer_is_not_held() -> None:
    moves = Moves(kv_tokens=16 * 8)
    play((0.0, moves.prefill("a", P0, final=True)), (0.0, moves.prefill("b", P0, final=True)))
    assert moves.notes == {"a": 10.0, "b": 20.0}
    assert moves.held() == [0, 0, 0]


def test_a_cache_that_nobody_pulls_is_released() -> None:
    moves = Moves()
    play((0.0, moves.prefill("r", P0)), (11.0, partial(moves.fleet.release, P0, "r")))
    assert moves.held() == [0, 0, 0]


@pytest.mark.parametrize(
    ("at_s", "engine"),
    [
        (1.0, P0),  # it waits for its embedding
        (5.0, P0),  # it is computed
        (20.05, D0),  # it is pulled
        (20.15, D0),  # it decodes
    ],
)
def test_what_is_aborted_leaves_nothing_behind(at_s: float, engine: WorkerId) -> None:
    moves = Moves()
    moves.fleet.divide(E0, SHARED)
    decode = [] if engine == P0 else [(20.0, moves.decode("r", P0, 30))]
    play(
        (0.0, moves.prefill("r", P0, "a")),
        (1.0, moves.encode("call", E0, "a", P0)),
        *decode,
        (at_s, moves.abort("r", engine)),
    )
    assert moves.held() == [0, 0, 0]
    assert "r decoded" not in moves.notes
    assert ("r" in moves.notes) == (engine == D0)


# Losses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_s", [12.0, 12.05])
def test_a_decode_fails_when_the_cache_is_lost_that_it_waits_for(at_s: float) -> None:
    moves = Moves()
    play(
        (0.0, moves.prefill("r", P0)),
        (12.0, moves.decode("r", P0)),
        (at_s, moves.lose(P0)),
    )
    assert moves.notes == {"r": 10.0, "r failed": at_s}
    assert moves.held() == [0, 0, 0]


def test_a_decode_fails_when_the_cache_was_lost_before() -> None:
    moves = Moves()
    play((0.0, moves.prefill("r", P0)), (11.0, moves.lose(P0)), (12.0, moves.decode("r", P0)))
    assert moves.notes == {"r": 10.0, "r failed": 12.0}


def test_a_decode_goes_on_without_the_engine_that_it_has_pulled_from() -> None:
    moves = Moves()
    play(
        (0.0, moves.prefill("r", P0)),
        (12.0, moves.decode("r", P0)),
        (12.15, moves.lose(P0)),
    )
    assert moves.notes["r decoded"] == pytest.approx(12.4)


@pytest.mark.parametrize("at_s", [12.05, 12.15])
def test_a_decode_engine_is_lost_with_what_it_had_and_the_source_is_free(at_s: float) -> None:
    moves = Moves()
    play(
        (0.0, moves.prefill("r", P0)),
        (12.0, moves.decode("r", P0)),
        (at_s, moves.lose(D0)),
        (13.0, moves.prefill("s", P0)),
        (25.0, moves.decode("s", P0)),
    )
    assert "r first" not in moves.notes
    assert moves.notes["s decoded"] == pytest.approx(25.4)
    assert moves.held() == [0, 0, 0]


def test_an_encoder_is_lost_with_its_calls_and_what_it_had() -> None:
    moves = Moves()
    play(
        (0.0, moves.encode("had", E1, "a", P0)),
        (2.0, moves.encode("running", E1, "b", P0)),
        (2.0, moves.encode("waiting", E1, "c", P0)),
        (2.5, moves.lose(E1)),
        (5.0, moves.encode("again", E1, "a", P0)),
    )
    assert moves.notes == {"had": 1.0, "again": 6.0}


@pytest.mark.parametrize(("at_s", "comes"), [(1.0 + TRANSFER_S / 2, False), (1.2, True)])
def test_what_an_encoder_has_sent_arrives_without_it_if_it_has_sent_all(
    at_s: float, comes: bool
) -> None:
    moves = Moves()
    play(
        (0.0, moves.encode("call", E1, "a", P0)),
        (1.05, moves.prefill("r", P0, "ab")),
        (1.05, moves.prefill("other", P0, "b")),
        (at_s, moves.lose(E1)),
        (2.0, moves.encode("second", E0, "b", P0)),
    )
    assert moves.missing == ({} if comes else {"r": ("a",)})
    expected = {"call": 1.0, "second": 3.0, "other": 13.0 + TRANSFER_S}
    expected |= {"other": 23.1, "r": 13.1} if comes else {"r failed": 1.0 + TRANSFER_S}
    assert moves.notes == pytest.approx(expected)
    assert moves.fleet.missing(P0, "ab") == (() if comes else ("a",))


def test_what_a_lost_encoder_did_not_send_does_not_keep_the_next_one() -> None:
    moves = Moves()
    play(
        (0.0, moves.encode("call", E1, "abcdefghijklmnopqrst", P0)),  # to be there at 3 s
        (1.1, moves.lose(E1)),
        (1.1, moves.encode("again", E1, "a", P0)),
        (1.1, moves.prefill("r", P0, "a")),
    )
    assert moves.notes == pytest.approx({"call": 1.0, "again": 2.1, "r": 12.1 + TRANSFER_S})


# Too long -----------------------------------------------------------------------------------------


def test_a_prompt_that_an_engine_cannot_hold_is_refused_and_no_other() -> None:
    moves = Moves()
    play(
        (0.0, moves.prefill("long", P0, num_tokens=16 * BLOCKS)),
        (0.0, moves.prefill("r", P0, num_tokens=16 * BLOCKS - 1)),
    )
    assert moves.notes == {"long failed": 0.0, "r": 10.0}
    assert moves.missing == {"long": ()}


def test_an_answer_that_an_engine_cannot_hold_is_refused_and_its_cache_given_back() -> None:
    moves = Moves()
    play(
        (0.0, moves.prefill("r", P0)),
        (12.0, moves.decode("r", P0, 16 * BLOCKS)),
    )
    assert moves.notes == {"r": 10.0, "r refused": 12.0}
    assert moves.held() == [0, 0, 0]
