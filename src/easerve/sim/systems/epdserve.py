"""EPDServe (vbdi/epdserve): pools of engines that pull from two global queues.

Items go to the encoders in turn. What is encoded, or prefilled, waits in a queue and holds its
place in the cache of the engine that made it until an engine of the next stage has pulled it.
Such an engine runs a step, then pulls the heads of the queue while it accepts them, one after
another, then runs the next step (``engine_context.py``, ``engine_decoding.py``). It accepts
little more than its next step: that is the back-pressure. Prompts are prefilled whole.

Items of a request that are pulled one by one all go to the engine that pulled the first; in the
repository they may end up at two engines, and then the request hangs (``scheduler_context.py``).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from easerve.costs.base import Media
from easerve.sim import sequences
from easerve.sim.clock import Effect
from easerve.sim.config import EpdServeSystem
from easerve.sim.encoder import Call
from easerve.sim.systems.epd_engines import Encoder, Engines, Loop, Prefilled, Shard, Whole
from easerve.sim.systems.handover import Requests
from easerve.sim.systems.roles import Roles
from easerve.sim.world import World
from easerve.types import NS_PER_S, Stage


class EpdServe:
    def __init__(self, config: EpdServeSystem, world: World) -> None:
        self._config, self._world = config, world
        self._requests = Requests(world)
        self._at_prefill = config.first_token_at == Stage.PREFILL.value
        self._costs = world.costs_of(config.prefill.tensor_parallel_size)
        self._engines = Engines(config, world)
        self.encoders = [self._engines.encoder(number) for number in range(config.encode.replicas)]
        self.prefills = [self._engines.prefill(number) for number in range(config.prefill.replicas)]
        self.decodes = [self._engines.decode(number) for number in range(config.decode.replicas)]
        self._turn = 0
        self._encoded: deque[Shard] = deque()
        self._prefilled: deque[Prefilled] = deque()
        self._roles = None if config.role_switch is None else Roles(config, config.role_switch)

    # Time -------------------------------------------------------------------------------------

    def start(self) -> Iterator[Effect]:
        return self._requests.start(self._arrived)

    def settle(self, now_ns: int) -> Iterator[Effect]:
        """Whoever is between two steps pulls, or else begins the next."""
        if self._roles is not None:
            self._roles.settle(self, now_ns)
        for encoder in self.encoders:
            yield from self._encode(encoder, now_ns)
        for loop in self.prefills:
            yield from self._pull_or_step(loop, self._pull_encoded, now_ns)
        for loop in self.decodes:
            yield from self._pull_or_step(loop, self._pull_prefilled, now_ns)

    def deadline_ns(self) -> int | None:
        if self._roles is None or not self._requests.num_open:
            return None
        return self._roles.deadline_ns

    def _pull_or_step(
        self,
        loop: Loop,
        pull: Callable[[Loop, int], Effect | None],
        now_ns: int,
    ) -> Iterator[Effect]:
        if loop.is_pulling or loop.engine.is_busy:
            return
        pulled = pull(loop, now_ns)
        if pulled is not None:
            loop.is_pulling = True
            yield pulled
        else:
            yield from loop.gate.step(loop.engine, now_ns)

    # Encode -----------------------------------------------------------------------------------

    def _arrived(self, name: str, now_ns: int) -> Iterable[Effect]:
        request = self._requests[name]
        parts: list[Sequence[Media]] = [request.items] if request.items else []
        if self._config.irp:
            parts = [[item] for item in request.items]
        if not self._fits(name, parts):
            return self._requests.end(name, "failed", now_ns)
        whole = Whole(name, max(1, len(parts)))
        if not parts:
            self._encoded.append(Shard((), whole))
        for part in parts:
            self._add(Shard(part, whole))
        return ()

    def _fits(self, name: str, parts: Sequence[Sequence[Media]]) -> bool:
        """Every stage; decode takes blocks for one token more than the longest answer."""
        request = self._requests[name]
        tokens = request.num_prompt_tokens
        longest = max(map(len, parts), default=0)
        prefill, decode = self.prefills[0].engine.limits, self.decodes[0].engine.limits
        return (
            longest <= self._config.encode.max_cached_items
            and sequences.blocks(tokens + 1) <= prefill.num_blocks
            and sequences.blocks(tokens + request.num_tokens + 1) <= decode.num_blocks
            and sequences.blocks(tokens) < decode.num_blocks
        )

    def _add(self, shard: Shard) -> None:
        """To the next encoder that takes any."""
        active = [encoder for encoder in self.encoders if encoder.is_active]
        self._turn = (self._turn + 1) % len(active)
        active[self._turn].waiting.append(shard)

    def _redistribute(self) -> None:
        """What waits, over all encoders anew."""
        shards = [shard for encoder in self.encoders for shard in encoder.waiting]
        for encoder in self.encoders:
            encoder.waiting.clear()
        for shard in shards:
            self._add(shard)

    def _encode(self, encoder: Encoder, now_ns: int) -> Iterable[Effect]:
        """A step takes requests as long as the cache holds their items."""
        if encoder.is_busy:
            return ()
        section, batch = self._config.encode, list[Shard]()
        while encoder.waiting and len(batch) < section.max_batch:
            num_items = len(encoder.waiting[0].items)
            if encoder.num_cached + num_items > section.max_cached_items:
                break
            encoder.num_cached += num_items
            batch.append(encoder.waiting.popleft())
        if not batch:
            return ()
        encoder.is_busy = True
        items = [item for shard in batch for item in shard.items]
        return encoder.engine.submit(Call(items, partial(self._ended, encoder, batch)), now_ns)

    def _ended(self, encoder: Encoder, batch: Sequence[Shard], now_ns: int) -> Iterable[Effect]:
        encoder.is_busy = False
        for shard in batch:
            shard.source = encoder
            self._encoded.append(shard)
        return ()

    # Prefill ----------------------------------------------------------------------------------

    def _pull_encoded(self, loop: Loop, now_ns: int) -> Effect | None:
        """The end of a pull, if there is one to begin."""
        if not self._encoded:
            return None
        shard = self._encoded[0]
        whole, engine = shard.whole, loop.engine
        if whole.puller is not None and whole.puller is not loop:
            return None
        if whole.puller is None and not loop.is_active:
            return None
        num_blocks = sequences.blocks(self._requests[whole.name].num_prompt_tokens)
        if not self._has_few_waiting(loop) or num_blocks > engine.num_free_blocks:
            return None
        self._encoded.popleft()
        if whole.puller is None:
            whole.puller = loop
            loop.num_parts += whole.num_missing
        tokens = sum(item.num_tokens for item in shard.items)
        seconds = self._costs.embedding_transfer(tokens) if tokens else 0.0
        return self._transfer(loop, seconds, tokens, partial(self._embedded, loop, shard), now_ns)

    def _has_few_waiting(self, loop: Loop) -> bool:
        engine = loop.engine
        threshold = self._config.pull_below * engine.limits.num_blocks
        return engine.num_waiting_blocks < threshold

    def _transfer(
        self,
        loop: Loop,
        seconds: float,
        tokens: int,
        then: Callable[[int], Iterable[Effect]],
        now_ns: int,
    ) -> Effect:
        end_ns = now_ns + round(seconds * NS_PER_S)
        self._world.run.note(loop.engine.name, "transfer", now_ns, end_ns, tokens=tokens)
        return end_ns, then

    def _embedded(self, loop: Loop, shard: Shard, now_ns: int) -> Iterable[Effect]:
        loop.is_pulling = False
        loop.num_parts -= 1
        if shard.source is not None:
            shard.source.num_cached -= len(shard.items)
        shard.whole.num_missing -= 1
        if shard.whole.num_missing:
            return ()
        name = shard.whole.name
        tokens = self._requests[name].num_prompt_tokens
        done = partial(self._prefill_done, name, loop)
        return loop.engine.submit(sequences.Sequence(name, tokens, 1, done), now_ns)

    def _prefill_done(self, name: str, loop: Loop, now_ns: int) -> Iterable[Effect]:
        if self._at_prefill:
            self._requests.first(name, now_ns)
            if self._requests[name].num_tokens <= 1:
                self._requests.completed(name, now_ns)
                return loop.engine.release(name, now_ns)
        self._prefilled.append(Prefilled(name, loop))
        return ()

    # Decode -----------------------------------------------------------------------------------

    def _pull_prefilled(self, loop: Loop, now_ns: int) -> Effect | None:
        if not self._prefilled or not loop.is_active:
            return None
        prefilled, engine = self._prefilled[0], loop.engine
        tokens = self._requests[prefilled.name].num_prompt_tokens
        num_blocks = engine.num_waiting_blocks + sequences.blocks(tokens)
        if engine.num_waiting > 2 * self._config.decode.max_batch:
            return None
        if not self._has_few_waiting(loop) or num_blocks >= engine.num_free_blocks:
            return None
        self._prefilled.popleft()
        seconds = self._costs.kv_transfer(tokens)
        return self._transfer(loop, seconds, tokens, partial(self._here, loop, prefilled), now_ns)

    def _here(self, loop: Loop, prefilled: Prefilled, now_ns: int) -> Iterator[Effect]:
        loop.is_pulling = False
        name = prefilled.name
        yield from prefilled.source.engine.release(name, now_ns)
        sequence = self._requests.answer(name, here=True, num_made=int(self._at_prefill))
        yield from loop.engine.submit(sequence, now_ns)

    # Roles ------------------------------------------------------------------------------------

    def pool(self, stage: Stage) -> Sequence[Encoder | Loop]:
        if stage is Stage.ENCODE:
            return self.encoders
        return self.prefills if stage is Stage.PREFILL else self.decodes

    def retire(self, stage: Stage) -> None:
        """What waits for an encoder goes to the others; the rest is done where it is."""
        last = self.pool(stage)[-1]
        last.is_active = False
        if isinstance(last, Encoder):
            while last.waiting:
                self._add(last.waiting.pop())

    def move(self, source: Stage, target: Stage, now_ns: int) -> None:
        left = self.pool(source)[-1]
        self._world.run.left(left.engine.name, now_ns)
        for pool in (self.encoders, self.prefills, self.decodes):
            if left in pool:
                pool.pop()
        if target is Stage.ENCODE:
            self.encoders.append(self._engines.encoder(len(self.encoders), now_ns))
            self._redistribute()
        elif target is Stage.PREFILL:
            self.prefills.append(self._engines.prefill(len(self.prefills), now_ns))
        else:
            self.decodes.append(self._engines.decode(len(self.decodes), now_ns))


def build(config: EpdServeSystem, world: World) -> EpdServe:
    return EpdServe(config, world)
