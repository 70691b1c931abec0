"""The modelled engine of a language model, by hand and against one that counts token by token."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest

from easerve.costs.base import Costs, Forward, Media
from easerve.costs.linear import LinearCosts
from easerve.sim import clock, sequences
from easerve.sim.clock import Effect
from easerve.sim.llm import LlmEngine, LlmLimits, TooLongError
from easerve.sim.run import Run
from easerve.sim.sharing import Own
from easerve.types import NS_PER_S, Modality, Stage

from .naive import Happened, Naive, NaiveEngine
from .play import Nothing, play

# A step takes 1 s for each token of a prompt, or 0.1 s for its decodes.
PLAIN = LinearCosts(0.0, 0.0, 0.0, 1.0, 0.1, 0.0)
ROOMY = LlmLimits(16_000)


class Recorded(Costs):
    """Keeps the forwards that it was asked for."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.forwards: list[Forward] = []

    def encode(self, items: Sequence[Media], share: float = 1.0) -> float:
        return self._costs.encode(items, share)

    def forward(self, step: Forward, share: float = 1.0) -> float:
        self.forwards.append(step)
        return self._costs.forward(step, share)

    def embedding_transfer(self, num_tokens: int) -> float:
        return self._costs.embedding_transfer(num_tokens)

    def kv_transfer(self, num_tokens: int) -> float:
        return self._costs.kv_transfer(num_tokens)


Asked = list[tuple[float, Callable[["Watched", int], Iterable[Effect]]]]


class Watched:
    """An engine whose story is kept."""

    def __init__(
        self,
        limits: LlmLimits = ROOMY,
        costs: Costs = PLAIN,
        part: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.run_of, self.costs = Run(), Recorded(costs)
        self.engine = LlmEngine("x", Stage.PREFILL, self.costs, Own(), limits, self.run_of, part)
        self.story: list[Happened] = []

    def submit(self, naive: Naive, now_ns: int) -> Iterable[Effect]:
        return self.engine.submit(
            sequences.Sequence(
                naive.key,
                naive.prompt,
                naive.want,
                partial(self._note, "done", naive.key),
                partial(self._note, "first", naive.key),
                naive.items,
                naive.pull_s,
                partial(self._note, "pulled", naive.key),
            ),
            now_ns,
        )

    def _note(self, what: str, key: int, now_ns: int) -> Iterator[Effect]:
        self.story.append(Happened(now_ns, what, key))
        yield from ()

    def _do(
        self, handler: Callable[["Watched", int], Iterable[Effect]], now_ns: int
    ) -> Iterable[Effect]:
        return handler(self, now_ns)

    def run(self, asked: Asked) -> "Watched":
        play(*((at_s, partial(self._do, what)) for at_s, what in asked))
        return self

    @property
    def times(self) -> dict[tuple[str, int], float]:
        """Of what happened, by what and to whom (s)."""
        return {(what, key): at_ns / NS_PER_S for at_ns, what, key, _, _ in self.story}


def submits(
    key: int,
    prompt: int,
    want: int,
    items: tuple[int, ...] = (),
    pull_s: float | None = None,
) -> Callable[[Watched, int], Iterable[Effect]]:
    media = tuple(Media(Modality.IMAGE, tokens) for tokens in items)
    return lambda watched, now_ns: watched.submit(Naive(key, prompt, want, media, pull_s), now_ns)


def aborts(key: int) -> Callable[[Watched, int], Iterable[Effect]]:
    return lambda watched, now_ns: watched.engine.abort(key, now_ns)


def releases(key: int) -> Callable[[Watched, int], Iterable[Effect]]:
    return lambda watched, now_ns: watched.engine.release(key, now_ns)


# By hand ------------------------------------------------------------------------------------------


def test_a_prompt_makes_the_first_token_and_each_step_one_more() -> None:
    watched = Watched().run([(1.0, submits(1, prompt=3, want=4))])
    assert watched.times == {("first", 1): 4.0, ("done", 1): pytest.approx(4.3)}
    assert watched.costs.forwards == [
        Forward(3, 1 + 2 + 3, 1),
        Forward(0, 0, 0, 1, 4),
        Forward(0, 0, 0, 1, 5),
        Forward(0, 0, 0, 1, 6),
    ]
    assert watched.run_of.busy_s == {"x": pytest.approx(3.3)}


def test_a_long_prompt_is_cut_to_the_budget_and_the_rest_goes_to_the_next() -> None:
    limits = replace(ROOMY, token_budget=4)
    watched = Watched(limits).run([(0.0, submits(1, 6, 1)), (0.0, submits(2, 3, 1))])
    assert [each.prefill_tokens for each in watched.costs.forwards] == [4, 4, 1]
    assert [each.num_prompts for each in watched.costs.forwards] == [0, 1, 1]
    assert [each.prefill_pairs for each in watched.costs.forwards] == [10, 5 + 6 + 1 + 2, 3]
    assert watched.times["done", 1] == 8.0
    assert watched.times["done", 2] == 9.0


def test_decodes_come_before_prompts_in_the_budget() -> None:
    limits = replace(ROOMY, token_budget=4)
    watched = Watched(limits).run([(0.0, submits(1, 1, 9)), (1.05, submits(2, 7, 1))])
    mixed = [each for each in watched.costs.forwards if each.num_decodes and each.prefill_tokens]
    assert [each.prefill_tokens for each in mixed] == [3, 3, 1]


def test_whole_prompts_are_not_cut_and_the_first_may_be_longer_than_the_budget() -> None:
    limits = replace(ROOMY, token_budget=4, chunked=False)
    asked: Asked = [(0.0, submits(key, prompt, 1)) for key, prompt in enumerate((9, 2, 2, 2))]
    watched = Watched(limits).run(asked)
    assert [each.prefill_tokens for each in watched.costs.forwards] == [9, 4, 2]


def test_so_many_prompts_in_a_step_and_no_more() -> None:
    limits = replace(ROOMY, max_prompts=1)
    watched = Watched(limits).run([(0.0, submits(key, 2, 1)) for key in range(3)])
    assert [each.num_prompts for each in watched.costs.forwards] == [1, 1, 1]


def test_who_finds_no_slot_waits_for_one() -> None:
    limits = replace(ROOMY, max_num_seqs=1)
    watched = Watched(limits).run([(0.0, submits(1, 1, 3)), (0.0, submits(2, 1, 1))])
    assert watched.times["done", 1] == pytest.approx(1.2)
    assert watched.times["done", 2] == pytest.approx(2.2)


def test_who_was_admitted_last_gives_way_and_is_computed_once_more() -> None:
    """Three blocks; each sequence needs a second one for its 17th token."""
    limits = LlmLimits(3 * 16, token_budget=64)
    watched = Watched(limits).run([(0.0, submits(1, 15, 10)), (0.0, submits(2, 15, 4))])
    assert watched.run_of.num_preempted == 1
    # The second has made two tokens when there is no block for its next; all 17 are computed.
    prompts = [each.prefill_tokens for each in watched.costs.forwards if each.prefill_tokens]
    assert prompts == [15, 15, 17]
    assert watched.times == {
        ("first", 1): 15.0,
        ("first", 2): pytest.approx(30.1),
        ("done", 1): pytest.approx(30.9),
        ("done", 2): pytest.approx(30.9 + 17 + 0.1),
    }
    assert watched.engine.num_free_blocks == 3


def test_with_reserves_nobody_gives_way_but_waits() -> None:
    limits = LlmLimits(3 * 16, token_budget=64, reserves=True)
    watched = Watched(limits).run([(0.0, submits(1, 15, 10)), (0.0, submits(2, 15, 4))])
    assert watched.run_of.num_preempted == 0
    assert watched.times["first", 2] == pytest.approx(15.9 + 15)


def test_what_is_done_is_held_until_it_is_released() -> None:
    limits = LlmLimits(2 * 16, holds=True)
    watched = Watched(limits).run(
        [(0.0, submits(1, 20, 1)), (0.0, submits(2, 20, 1)), (50.0, releases(1))]
    )
    assert watched.times == {
        ("first", 1): 20.0,
        ("done", 1): 20.0,
        ("first", 2): 70.0,
        ("done", 2): 70.0,
    }
    assert (watched.engine.holds(1), watched.engine.holds(2)) == (False, True)
    assert watched.engine.num_free_blocks == 0


def test_a_pulled_cache_computes_its_last_token_again() -> None:
    watched = Watched().run([(0.0, submits(1, 20, 3, pull_s=2.0))])
    assert watched.times == {
        ("pulled", 1): 2.0,
        ("first", 1): pytest.approx(2.1),
        ("done", 1): pytest.approx(2.3),
    }
    assert [each.decode_context for each in watched.costs.forwards] == [20, 21, 22]


def test_pulls_come_one_after_another() -> None:
    watched = Watched().run([(0.0, submits(key, 20, 1, pull_s=2.0)) for key in (1, 2, 3)])
    assert [watched.times["pulled", key] for key in (1, 2, 3)] == [2.0, 4.0, 6.0]


def test_a_pull_waits_for_blocks_and_for_who_came_before() -> None:
    limits = LlmLimits(2 * 16)
    watched = Watched(limits).run(
        [(0.0, submits(key, prompt, 2, pull_s=1.0)) for key, prompt in ((1, 20), (2, 20), (3, 5))]
    )
    assert watched.times["pulled", 2] == pytest.approx(1.2 + 1)
    assert watched.times["pulled", 3] == pytest.approx(2.4 + 1)


def test_items_are_encoded_in_the_step_of_their_first_token() -> None:
    costs = LinearCosts(100.0, 0.0, 0.0, 1.0, 0.1, 0.0)
    limits = replace(ROOMY, token_budget=4, item_s=1000.0)
    watched = Watched(limits, costs).run([(0.0, submits(1, 7, 1, items=(2, 4)))])
    # Four tokens with the first picture, as the second finds no room; it comes with the rest.
    assert [each.prefill_tokens for each in watched.costs.forwards] == [2, 4, 1]
    assert watched.times["done", 1] == 7.0 + 2 * 100.0 + 2 * 1000.0


def test_what_no_cache_can_hold_is_refused() -> None:
    engine = Watched(LlmLimits(2 * 16)).engine
    with pytest.raises(TooLongError, match="a sequence of 33 tokens, but the KV cache holds 32"):
        engine.submit(sequences.Sequence(1, 30, 3, sequences.nothing), 0)
    assert engine.num_seqs == 0


def test_no_step_begins_while_it_may_have_nothing_of_its_device() -> None:
    parts = iter((0.0, 0.5))
    watched = Watched(part=lambda: next(parts, 1.0))
    watched.run(
        [(0.0, submits(1, 2, 2)), (5.0, lambda watched, now_ns: watched.engine.wake(now_ns))]
    )
    assert watched.times == {("first", 1): 9.0, ("done", 1): pytest.approx(9.1)}


@pytest.mark.parametrize("at_s", [0.5, 1.5, 2.5, 3.05, 3.25])
def test_it_forgets_all_when_it_dies(at_s: float) -> None:
    """Waiting, pulling, computing and decoding; what comes later finds it empty."""
    limits = LlmLimits(16 * 16, max_num_seqs=3, token_budget=2, holds=True)

    def dies(watched: Watched, now_ns: int) -> Iterable[Effect]:
        watched.story.clear()
        return watched.engine.reset(now_ns)

    watched = Watched(limits).run(
        [
            *((0.0, submits(key, 3, 9)) for key in range(5)),
            (0.0, submits(9, 3, 9, pull_s=3.2)),
            (at_s, dies),
            (10.0, submits(10, 2, 2)),
        ]
    )
    assert watched.times == {("first", 10): 12.0, ("done", 10): pytest.approx(12.1)}
    assert watched.engine.num_free_blocks == 16 - 1  # what is held
    assert watched.engine.num_seqs == 0


def test_everybody_gives_way_who_has_to_and_goes_on_as_soon_as_there_is_room() -> None:
    """One slot. The first needs a fourth block, when the second waits with two of the five."""
    limits = LlmLimits(5 * 16, max_num_seqs=1)
    watched = Watched(limits).run(
        [(0.0, submits(1, 31, 20, pull_s=1.0)), (0.5, submits(2, 31, 2, pull_s=1.0))]
    )
    assert watched.run_of.num_preempted == 1
    assert watched.times["done", 2] == pytest.approx(1.0 + 18 * 0.1 + 2 * 0.1)
    assert watched.times["done", 1] == pytest.approx(3.0 + 31 + 18 + 0.1)
    assert watched.engine.num_free_blocks == 5


# Against the oracle -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """``lost``: when it is aborted (ns); ``kept``: how long it is held when it is done (ns)."""

    naive: Naive
    at_ns: int
    lost_ns: int | None
    released_ns: int


def limits_of(rng: random.Random) -> LlmLimits:
    return LlmLimits(
        kv_tokens=16 * rng.randint(8, 40),
        max_num_seqs=rng.choice((1, 2, 3, 8)),
        token_budget=rng.choice((8, 16, 50)),
        chunked=rng.random() < 0.7,
        max_prompts=rng.choice((1, 2, 1 << 30)),
        reserves=rng.random() < 0.2,
        holds=rng.random() < 0.3,
        item_s=0.001,
        item_budget=rng.choice((None, 12, 40)),
    )


def loads(rng: random.Random, limits: LlmLimits, num: int) -> list[Load]:
    """No two times are alike, nor is one the end of a step: they are drawn to the nanosecond."""
    found, at_ns = [], 0
    most = limits.num_blocks * 16
    for key in range(num):
        at_ns += rng.randint(1, NS_PER_S // 5)
        items = tuple(
            Media(Modality.IMAGE, rng.randint(1, 20)) for _ in range(rng.choice((0, 0, 1, 3)))
        )
        text = rng.randint(1, 40)
        prompt = min(text + sum(item.num_tokens for item in items), most - 1)
        pull_s = rng.uniform(0.001, 0.2) if rng.random() < 0.3 else None
        if pull_s is not None:
            items = ()
        want = min(rng.choice((1, 2, 20, 60)), most - prompt)
        naive = Naive(key, prompt, max(1, want), items, pull_s)
        lost_ns = at_ns + rng.randint(1, NS_PER_S) if rng.random() < 0.3 else None
        found.append(Load(naive, at_ns, lost_ns, at_ns + rng.randint(1, 5 * NS_PER_S)))
    return found


COSTS = LinearCosts(0.0111, 1.7e-5, 0.0123, 1.3e-4, 0.0207, 0.0313)


def both(seed: int) -> tuple[Watched, NaiveEngine]:
    rng = random.Random(seed)
    limits = limits_of(rng)
    load = loads(rng, limits, rng.randint(2, 14))
    naive = NaiveEngine(limits, COSTS)
    watched = Watched(limits, COSTS)
    asked: list[tuple[int, Callable[[NaiveEngine], None]]] = []
    effects: list[Effect] = []
    for each in load:
        key = each.naive.key
        asked.append((each.at_ns, partial(NaiveEngine.submit, sequence=replace(each.naive))))
        effects.append((each.at_ns, partial(watched.submit, each.naive)))
        if each.lost_ns is not None:
            asked.append((each.lost_ns, partial(NaiveEngine.abort, key=key)))
            effects.append((each.lost_ns, partial(watched.engine.abort, key)))
        asked.append((each.released_ns, partial(NaiveEngine.release, key=key)))
        effects.append((each.released_ns, partial(watched.engine.release, key)))
    # Whatever is still held in the end is released, as its decode would.
    for each in load:
        end_ns = 1000 * NS_PER_S + each.naive.key
        asked.append((end_ns, partial(NaiveEngine.release, key=each.naive.key)))
        effects.append((end_ns, partial(watched.engine.release, each.naive.key)))
    naive.run(asked)
    clock.run(Nothing(), effects)
    return watched, naive


def check(seeds: Iterable[int]) -> int:
    """How many sequences gave way."""
    num_preempted = 0
    for seed in seeds:
        watched, naive = both(seed)
        steps = [each.forward for each in naive.story if each.what == "step"]
        assert watched.costs.forwards == steps, seed
        happened = [each for each in naive.story if each.what != "step"]
        assert sorted(watched.story) == sorted(happened), seed
        assert watched.run_of.num_preempted == naive.num_preempted, seed
        assert watched.engine.num_free_blocks == naive.free, seed
        assert watched.engine.num_waiting == len(naive.waiting), seed
        if not naive.held:
            assert (naive.waiting, naive.free) == ([], naive.limits.num_blocks), seed
        num_preempted += naive.num_preempted
    return num_preempted


def test_it_does_what_counting_token_by_token_does() -> None:
    assert check(range(120)) > 20


@pytest.mark.long
def test_it_does_what_counting_token_by_token_does_over_many_seeds() -> None:
    assert check(range(120, 3000)) > 500
