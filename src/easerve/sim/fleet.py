"""Modelled engines of a deployment with encode, prefill and decode engines, and what moves between.

The core's actions come here in the simulator, the driver's calls in the parity test: encode a
batch and push its embeddings, prefill when they are there and hold the KV cache, pull it and
decode. Whatever an engine has done is told by an effect of its own, so that what is told of one
instant has an order.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from easerve.costs.base import Costs, Media
from easerve.policy.partition import Demand
from easerve.sim import sequences
from easerve.sim.clock import Effect, Handler
from easerve.sim.encoder import Call, EncodeEngine
from easerve.sim.host import NoHost
from easerve.sim.lanes import Lanes
from easerve.sim.llm import LlmEngine, TooLongError
from easerve.sim.run import Run
from easerve.sim.sharing import Colocated
from easerve.types import NS_PER_S, WorkerId

Finished = Callable[[float, int], Iterable[Effect]]
"""Is told how long a prefill waited for embeddings (s), and the time (ns)."""
Unserved = Callable[[tuple[str, ...], int], Iterable[Effect]]
"""Is told which embeddings a prefill waits for that do not come, and the time (ns); none of them:
its engine refuses a prompt that is so long.
"""
Failed = Callable[[bool, int], Iterable[Effect]]
"""Is told whether a decode may go better another time, and the time (ns)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An item of an encoder's call, and the prefill engines that its embedding is pushed to."""

    key: str
    media: Media
    destinations: tuple[WorkerId, ...]


@dataclass(eq=False, slots=True)
class Waiting:
    """A prefill that waits for embeddings. ``keys``: that are not there yet. ``final``: it makes
    the whole answer. ``since_ns``: when its engine had heard of it; None: not yet.
    """

    sequence: sequences.Sequence
    keys: set[str]
    finished: Finished
    failed: Unserved
    final: bool
    since_ns: int | None = None


@dataclass(eq=False, slots=True)
class Pull:
    """A decode that has not got its KV cache yet."""

    decode: WorkerId
    source: WorkerId
    failed: Failed


class Fleet:
    """``host``: what goes on around the engines' steps."""

    def __init__(
        self,
        costs: Costs,
        run: Run,
        encoders: Iterable[EncodeEngine],
        prefills: Iterable[LlmEngine],
        decodes: Iterable[LlmEngine],
        beside: Mapping[WorkerId, Colocated],
        neighbours: Mapping[WorkerId, frozenset[WorkerId]],
        host: NoHost | None = None,
    ) -> None:
        """``beside``: of each encoder that shares its device, that device. ``neighbours``: of each
        encoder, the prefill engines on its device.
        """
        self._costs, self._run = costs, run
        self.encoders = {WorkerId(engine.name): engine for engine in encoders}
        self.prefills = {WorkerId(engine.name): engine for engine in prefills}
        self.decodes = {WorkerId(engine.name): engine for engine in decodes}
        self._beside, self._neighbours = beside, neighbours
        self.host = host or NoHost()
        for engine in self.decodes.values() if self.host.takes_time else ():
            engine.after_step = partial(self.host.stepped, engine.name)
        self._links: defaultdict[WorkerId, Lanes] = defaultdict(Lanes)
        """Of each encoder."""
        self._stores: defaultdict[WorkerId, set[str]] = defaultdict(set)
        """Embeddings that each encoder and prefill engine has."""
        self._coming: defaultdict[WorkerId, Counter[str]] = defaultdict(Counter)
        """Those on their way to each prefill engine."""
        self._demands: defaultdict[WorkerId, dict[Call, Demand]] = defaultdict(dict)
        """Of the calls to encoders that share their devices."""
        self._waiting: dict[WorkerId, dict[Hashable, Waiting]] = {
            name: {} for name in self.prefills
        }
        self._num_prepared = 0
        self._pulls: dict[Hashable, Pull] = {}
        self._lives: defaultdict[WorkerId, int] = defaultdict(int)
        """How often each engine has died."""

    def prepare(self, num_items: int, then: Handler, now_ns: int) -> Iterable[Effect]:
        """A request's media are decoded, and its prompt rendered by an engine in turn."""
        engines = [*self.encoders] if num_items else [*self.prefills]
        self._num_prepared += 1
        renders = engines[self._num_prepared % len(engines)]
        return self.host.prepare(num_items, renders, then, now_ns)

    # Encode -----------------------------------------------------------------------------------

    def encode(
        self,
        encoder: WorkerId,
        entries: Sequence[Entry],
        demand: Demand,
        done: Handler,
        now_ns: int,
    ) -> tuple[Call, Iterable[Effect]]:
        """One call; ``done`` when its embeddings are made and on their way. What the encoder has
        already is only sent.
        """
        has = self._stores[encoder]
        new = [entry.media for entry in entries if entry.key not in has]
        call = Call(new, done)
        if not new:
            return call, self._push(encoder, entries, done, now_ns)
        call.done = partial(self._encoded, encoder, call, entries, done)
        if encoder in self._beside:
            self._demands[encoder][call] = demand
            self._beside[encoder].announce(encoder, demand)
        submit = partial(self._call, encoder, self._lives[encoder], call)
        return call, self.host.call_encode(encoder, len(entries), submit, now_ns)

    def _call(self, encoder: WorkerId, life: int, call: Call, now_ns: int) -> Iterable[Effect]:
        """If the encoder still lives that was called."""
        if life != self._lives[encoder]:
            return ()
        return self.encoders[encoder].submit(call, now_ns)

    def drop(self, encoder: WorkerId, call: Call, now_ns: int) -> Iterable[Effect]:
        """Nobody waits for a call any more. It demands nothing, unless its forward runs."""
        if self.encoders[encoder].drop(call):
            return ()
        return self._withdraw(encoder, call, now_ns)

    def _withdraw(self, encoder: WorkerId, call: Call, now_ns: int) -> Iterable[Effect]:
        demand = self._demands[encoder].pop(call, None)
        if demand is None:
            return ()
        return self._beside[encoder].withdraw(encoder, demand, now_ns)

    def divide(self, encoder: WorkerId, demand: Demand) -> None:
        """What the encoder has of its device between calls."""
        if encoder in self._beside:
            self._beside[encoder].stand(encoder, demand)

    def _encoded(
        self, encoder: WorkerId, call: Call, entries: Sequence[Entry], done: Handler, now_ns: int
    ) -> Iterator[Effect]:
        yield from self._withdraw(encoder, call, now_ns)
        self._stores[encoder].update(entry.key for entry in entries)
        yield from self._push(encoder, entries, done, now_ns)

    def _push(
        self, encoder: WorkerId, entries: Sequence[Entry], done: Handler, now_ns: int
    ) -> Iterator[Effect]:
        """A bundle to each destination, one after another."""
        yield now_ns, done
        bundles: dict[WorkerId, list[Entry]] = {}
        for entry in entries:
            for destination in entry.destinations:
                bundles.setdefault(destination, []).append(entry)
        for destination, bundle in bundles.items():
            self._coming[destination].update(entry.key for entry in bundle)
            lives = self._lives[destination], self._lives[encoder]
            arrived = partial(self._arrived, encoder, destination, lives, bundle)
            if destination in self._neighbours.get(encoder, ()):
                yield now_ns, arrived
                continue
            num_tokens = sum(entry.media.num_tokens for entry in bundle)
            seconds = self._costs.embedding_transfer(num_tokens)
            begin_ns, end_ns = self._links[encoder].take(seconds, now_ns)
            self._run.note(encoder, "transfer", begin_ns, end_ns, to=destination, tokens=num_tokens)
            yield end_ns, arrived

    def _arrived(
        self,
        encoder: WorkerId,
        prefill: WorkerId,
        lives: tuple[int, int],
        bundle: Sequence[Entry],
        now_ns: int,
    ) -> Iterator[Effect]:
        """Unless one of the two has died meanwhile."""
        keys = [entry.key for entry in bundle]
        if lives[0] != self._lives[prefill]:
            return
        self._coming[prefill] -= Counter(keys)
        if lives[1] != self._lives[encoder]:
            yield from self._missed(prefill, keys, now_ns)
            return
        self._stores[prefill].update(keys)
        for waiting in list(self._waiting[prefill].values()):
            waiting.keys.difference_update(keys)
            yield from self._begin(prefill, waiting, now_ns)

    def _missed(self, prefill: WorkerId, keys: Sequence[str], now_ns: int) -> Iterator[Effect]:
        """These do not come: whoever waits for them says so, when they should have been there."""
        for leg, waiting in list(self._waiting[prefill].items()):
            missing = [key for key in self.missing(prefill, keys) if key in waiting.keys]
            if missing:
                del self._waiting[prefill][leg]
                yield now_ns, partial(waiting.failed, tuple(missing))

    # Prefill and decode -----------------------------------------------------------------------

    def prefill(
        self,
        prefill: WorkerId,
        leg: Hashable,
        num_tokens: int,
        keys: Iterable[str],
        finished: Finished,
        failed: Unserved,
        now_ns: int,
        final: bool = False,
    ) -> Iterable[Effect]:
        """As soon as the embeddings with these keys are there; then its KV cache is held, unless it
        is ``final``: its token ends the answer.
        """
        sequence = sequences.Sequence(leg, num_tokens, 1, sequences.nothing)
        waiting = Waiting(sequence, set(keys) - self._stores[prefill], finished, failed, final)
        self._waiting[prefill][leg] = waiting
        return self.host.call_prefill(prefill, partial(self._called, prefill, waiting), now_ns)

    def _called(self, prefill: WorkerId, waiting: Waiting, now_ns: int) -> Iterable[Effect]:
        waiting.since_ns = now_ns
        return self._begin(prefill, waiting, now_ns)

    def missing(self, prefill: WorkerId, keys: Iterable[str]) -> tuple[str, ...]:
        """Those of the embeddings that a prefill engine does not have, nor soon will."""
        there, coming = self._stores[prefill], self._coming[prefill]
        return tuple(key for key in dict.fromkeys(keys) if key not in there and not coming[key])

    def _begin(self, prefill: WorkerId, waiting: Waiting, now_ns: int) -> Iterable[Effect]:
        """If nothing is missing any more, and it is still wanted."""
        leg = waiting.sequence.key
        if waiting.keys or waiting.since_ns is None or self._waiting[prefill].get(leg) != waiting:
            return ()
        del self._waiting[prefill][leg]
        wait_s = (now_ns - waiting.since_ns) / NS_PER_S
        waiting.sequence.done = partial(self._prefilled, prefill, waiting, wait_s)
        try:
            return self.prefills[prefill].submit(waiting.sequence, now_ns)
        except TooLongError:
            return [(now_ns, partial(waiting.failed, ()))]

    def _prefilled(
        self, prefill: WorkerId, waiting: Waiting, wait_s: float, now_ns: int
    ) -> Iterator[Effect]:
        if waiting.final:
            yield from self.release(prefill, waiting.sequence.key, now_ns)
        yield now_ns, partial(waiting.finished, wait_s)

    def decode(
        self,
        decode: WorkerId,
        leg: Hashable,
        source: WorkerId,
        num_prompt: int,
        num_tokens: int,
        first: Handler,
        done: Handler,
        failed: Failed,
        now_ns: int,
    ) -> Iterable[Effect]:
        """Pull the KV cache that ``source`` holds, and generate. ``failed``: the cache is lost, or
        the engine refuses an answer that is so long.
        """
        if not self.prefills[source].holds(leg):
            return [(now_ns, partial(failed, True))]
        seconds = self._costs.kv_transfer(num_prompt)
        pulled = partial(self._pulled, leg)
        self._pulls[leg] = Pull(decode, source, failed)
        delivered = partial(self.host.delivered, decode)
        sequence = sequences.Sequence(
            leg,
            num_prompt,
            num_tokens,
            partial(delivered, done),
            partial(delivered, first),
            pull_s=seconds,
            pulled=pulled,
        )
        submit = partial(self._submit, decode, sequence)
        return self.host.call_decode(decode, submit, now_ns)

    def _submit(
        self, decode: WorkerId, sequence: sequences.Sequence, now_ns: int
    ) -> Iterable[Effect]:
        """If it is still wanted."""
        if sequence.key not in self._pulls:
            return ()
        try:
            return self.decodes[decode].submit(sequence, now_ns)
        except TooLongError:
            return self._refused(sequence.key, now_ns)

    def _refused(self, leg: Hashable, now_ns: int) -> Iterator[Effect]:
        pull = self._pulls.pop(leg)
        yield from self.release(pull.source, leg, now_ns)
        yield now_ns, partial(pull.failed, False)

    def _pulled(self, leg: Hashable, now_ns: int) -> Iterator[Effect]:
        source = self._pulls.pop(leg).source
        yield from self.prefills[source].release(leg, now_ns)
        yield from self.host.hand_over(source, now_ns)

    def release(self, prefill: WorkerId, leg: Hashable, now_ns: int) -> Iterable[Effect]:
        """Nobody pulls this KV cache."""
        return self.prefills[prefill].release(leg, now_ns)

    def abort(self, engine: WorkerId, leg: Hashable, now_ns: int) -> Iterator[Effect]:
        """A prefill or decode that nobody wants any more, with what it would have pulled."""
        if engine in self._waiting and self._waiting[engine].pop(leg, None) is not None:
            return
        pull = self._pulls.pop(leg, None)
        if pull is not None:
            yield from self.prefills[pull.source].release(leg, now_ns)
        yield from (self.prefills | self.decodes)[engine].abort(leg, now_ns)

    # Failures ---------------------------------------------------------------------------------

    def lose(self, engine: WorkerId, now_ns: int) -> Iterator[Effect]:
        """It has died, with everything that it held. It comes back empty, whenever it is used."""
        self._lives[engine] += 1
        self._stores.pop(engine, None)
        self._coming.pop(engine, None)
        self._demands.pop(engine, None)
        self._links.pop(engine, None)
        if engine in self._waiting:
            self._waiting[engine].clear()
        for leg, pull in list(self._pulls.items()):
            if engine in (pull.source, pull.decode):
                del self._pulls[leg]
                yield from self.prefills[pull.source].release(leg, now_ns)
                if engine == pull.source:
                    yield from self.decodes[pull.decode].abort(leg, now_ns)
                    yield now_ns, partial(pull.failed, True)
        if engine not in self.encoders:
            yield from (self.prefills | self.decodes)[engine].reset(now_ns)
            return
        if engine in self._beside:
            yield from self._beside[engine].forget(engine, now_ns)
        yield from self.encoders[engine].reset(now_ns)
