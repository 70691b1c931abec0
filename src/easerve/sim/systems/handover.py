"""What the compared systems share: open requests and their records, turns, gates, the hand-over.

Every request ends once, in one record, also one that no engine can hold.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from easerve.costs.base import Costs
from easerve.goodput import Outcome
from easerve.sim import sequences
from easerve.sim.clock import Effect
from easerve.sim.llm import LlmEngine, TooLongError
from easerve.sim.run import Request
from easerve.sim.world import World
from easerve.types import NS_PER_S, Stage

T = TypeVar("T")
Arrived = Callable[[str, int], Iterable[Effect]]
"""Is told the name of a request that has come, and when (ns)."""


class Turns(Generic[T]):
    """One after the other, round and round."""

    def __init__(self, each: Sequence[T]) -> None:
        self._each, self._next = each, 0

    def take(self) -> T:
        taken = self._each[self._next % len(self._each)]
        self._next = (self._next + 1) % len(self._each)
        return taken


class Gate:
    """Steps of an engine begin when they are let: ``part`` is what it may take of its device."""

    def __init__(self) -> None:
        self._is_open = False

    def part(self) -> float:
        return 1.0 if self._is_open else 0.0

    def step(self, engine: LlmEngine, now_ns: int) -> Iterator[Effect]:
        """Let it begin one, if it has something to do."""
        self._is_open = True
        yield from engine.wake(now_ns)
        self._is_open = False


class Requests:
    """Those of a run by name, until they end."""

    def __init__(self, world: World) -> None:
        self._run = world.run
        width = len(str(len(world.requests)))
        self._open = {f"r{index:0{width}}": request for index, request in enumerate(world.requests)}
        self._first_ns: dict[str, int] = {}

    def start(self, arrived: Arrived) -> Iterator[Effect]:
        """They come."""
        for name, request in self._open.items():
            yield round(request.at_s * NS_PER_S), partial(arrived, name)

    def __getitem__(self, name: str) -> Request:
        return self._open[name]

    @property
    def num_open(self) -> int:
        """That have not ended, those included that have not come."""
        return len(self._open)

    def first(self, name: str, now_ns: int) -> Iterable[Effect]:
        """The client has seen its first token."""
        self._first_ns.setdefault(name, now_ns)
        return ()

    def end(self, name: str, outcome: Outcome, now_ns: int) -> Iterable[Effect]:
        request = self._open.pop(name)
        self._run.record(name, request, self._first_ns.pop(name, None), now_ns, outcome)
        return ()

    def answer(self, name: str, **options: Any) -> sequences.Sequence:
        """All of a request's tokens, seen by its client as they come; ``options``: as it has."""
        request = self._open[name]
        done, first = partial(self.completed, name), partial(self.first, name)
        return sequences.Sequence(
            name, request.num_prompt_tokens, request.num_tokens, done, first, **options
        )

    def completed(self, name: str, now_ns: int) -> Iterable[Effect]:
        return self.end(name, "completed", now_ns)


class HandOver:
    """From a prefill engine, which makes the first token and may hold the KV cache, to decode.

    ``first_at``: whose first token the client sees. Decode goes on after the one of prefill, or
    makes all of them.
    """

    def __init__(self, requests: Requests, costs: Costs, first_at: Stage, holds: bool) -> None:
        self._requests, self._costs, self._holds = requests, costs, holds
        self._at_prefill = first_at is Stage.PREFILL

    def prefill(
        self,
        name: str,
        engine: LlmEngine,
        decode: Callable[[], LlmEngine],
        now_ns: int,
    ) -> Iterable[Effect]:
        """``decode``: the engine that is asked when prefill is done."""
        done = partial(self._prefilled, name, engine, decode)
        sequence = sequences.Sequence(name, self._requests[name].num_prompt_tokens, 1, done)
        try:
            return engine.submit(sequence, now_ns)
        except TooLongError:
            return self._requests.end(name, "failed", now_ns)

    def _prefilled(
        self, name: str, engine: LlmEngine, decode: Callable[[], LlmEngine], now_ns: int
    ) -> Iterator[Effect]:
        if self._at_prefill:
            yield from self._requests.first(name, now_ns)
            if self._requests[name].num_tokens <= 1:
                yield from self._requests.completed(name, now_ns)
                yield from engine.release(name, now_ns)
                return
        yield from self._decode(name, engine, decode(), now_ns)

    def _decode(
        self, name: str, source: LlmEngine, target: LlmEngine, now_ns: int
    ) -> Iterable[Effect]:
        pull_s = self._costs.kv_transfer(self._requests[name].num_prompt_tokens)
        sequence = self._requests.answer(name, pull_s=pull_s, num_made=int(self._at_prefill))
        if self._holds:
            sequence.pulled = partial(source.release, name)
        try:
            return target.submit(sequence, now_ns)
        except TooLongError:
            self._requests.end(name, "failed", now_ns)
            return source.release(name, now_ns)
