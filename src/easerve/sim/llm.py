"""A modelled engine of a language model: continuous batching as vLLM's V1 scheduler does it.

In every step first the sequences that decode get a token each, then prompts that have begun, then
waiting ones, first come first served, while tokens, slots and KV blocks last. KV blocks are taken
for the whole prompt when a sequence is admitted; when decodes run out of them, the sequence that
was admitted last is computed once more later. What decodes is counted as a group: a step costs the
same whatever their number.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from easerve.costs.base import Costs, Forward, Media
from easerve.sim.clock import Effect
from easerve.sim.encoder import whole
from easerve.sim.lanes import Lanes
from easerve.sim.run import Run
from easerve.sim.sequences import BLOCK_TOKENS, Decodes, Sequence, blocks
from easerve.sim.sharing import Device
from easerve.types import Stage


class TooLongError(Exception):
    """The KV cache of an engine cannot hold this sequence."""


@dataclass(frozen=True, slots=True)
class LlmLimits:
    """``kv_tokens``: of the KV cache. ``max_num_seqs``, ``token_budget``: as vLLM's of a step.

    ``chunked``: prompts are cut to the budget; else they are taken whole, the first of a step even
    if it is longer. ``max_prompts``: of a step. ``reserves``: a sequence takes the blocks of its
    longest answer when it is admitted. ``holds``: the KV cache of a sequence that is done is kept
    until it is released. ``item_s``: host time of an item that the engine itself encodes.
    ``item_budget``: embeddings of such items in a step; None: as ``token_budget``.
    """

    kv_tokens: int
    max_num_seqs: int = 256
    token_budget: int = 2048
    chunked: bool = True
    max_prompts: int = 1 << 30
    reserves: bool = False
    holds: bool = False
    item_s: float = 0.0
    item_budget: int | None = None

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // BLOCK_TOKENS


class LlmEngine:
    """``stage``: as it is counted. ``part``: of its device that a step which begins now may take;
    0: none may begin until ``wake``.
    """

    def __init__(
        self,
        name: str,
        stage: Stage,
        costs: Costs,
        device: Device,
        limits: LlmLimits,
        run: Run,
        part: Callable[[], float] = whole,
    ) -> None:
        self.name, self._costs, self._device, self._run = name, costs, device, run
        self.limits, self._part = limits, part
        self._waiting: deque[Sequence] = deque()
        self._arrived: deque[Sequence] = deque()
        """Those whose KV cache has been pulled."""
        self._running: dict[Sequence, None] = {}
        """Admitted and not done, in this order; the last is the first to be preempted."""
        self._prompts: dict[Sequence, None] = {}
        """Those of them whose prompt is not computed yet."""
        self._decodes = Decodes()
        self._sequences: dict[Hashable, Sequence] = {}
        self._held: dict[Hashable, int] = {}
        self._pulling: set[Sequence] = set()
        self._link = Lanes()
        self._free_blocks = limits.num_blocks
        self._busy, self._epoch = False, 0
        self.after_step: Callable[[int, int], Iterable[Effect]] | None = None
        """What follows from a step that made so many tokens, at a time (ns)."""
        run.engine(name, stage)

    # Interface --------------------------------------------------------------------------------

    def submit(self, sequence: Sequence, now_ns: int) -> Iterator[Effect]:
        """Raises TooLongError."""
        longest = sequence.num_prompt + sequence.num_tokens
        if blocks(longest) > self.limits.num_blocks:
            raise TooLongError(
                f"{self.name}: a sequence of {longest} tokens, but the KV cache holds "
                f"{self.limits.num_blocks * BLOCK_TOKENS}"
            )
        self._sequences[sequence.key] = sequence
        self._waiting.append(sequence)
        return self.wake(now_ns)

    def release(self, key: Hashable, now_ns: int) -> Iterator[Effect]:
        """The KV cache that was held is not needed any more."""
        self._free_blocks += self._held.pop(key, 0)
        return self.wake(now_ns)

    def abort(self, key: Hashable, now_ns: int) -> Iterator[Effect]:
        """Nobody wants it any more. A step that runs goes on, with it."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._forget(sequence)
        return self.release(key, now_ns)

    def reset(self, now_ns: int) -> Iterable[Effect]:
        """It has died, and forgets all."""
        self._epoch += 1
        for each in (self._waiting, self._arrived, self._running, self._prompts, self._held):
            each.clear()
        self._sequences.clear()
        self._pulling.clear()
        self._decodes, self._link, self._busy = Decodes(), Lanes(), False
        self._free_blocks = self.limits.num_blocks
        return self._device.drop(self.name, now_ns)

    @property
    def num_seqs(self) -> int:
        """Those that are here and not done."""
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        return self._free_blocks

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way."""
        return self._busy

    @property
    def num_waiting_blocks(self) -> int:
        """That the prompts of those who wait will take."""
        return sum(blocks(sequence.num_to_compute) for sequence in self._waiting)

    def holds(self, key: Hashable) -> bool:
        """Whether the KV cache of a sequence that is done is kept for who pulls it."""
        return key in self._held

    def wake(self, now_ns: int) -> Iterator[Effect]:
        """Begin a step, if there is none and something to do."""
        part = 0.0 if self._busy else self._part()
        if part:
            yield from self._step(part, now_ns)

    # A step -----------------------------------------------------------------------------------

    def _step(self, part: float, now_ns: int) -> Iterator[Effect]:
        if self._arrived:
            self._join_arrived()
        preempted = self._make_room()
        chunks: list[tuple[Sequence, int]] = []
        items: list[Media] = []
        budget = self.limits.token_budget - len(self._decodes.running)
        for sequence in self._prompts:
            budget -= self._chunk(sequence, budget, chunks, items)
        if self._waiting and not preempted:
            yield from self._admit(budget, chunks, items, now_ns)
        num_decodes = len(self._decodes.running)
        if not chunks and not num_decodes:
            if preempted:  # everything: what has room now may begin
                yield from self._step(part, now_ns)
            return
        self._busy = True
        self._decodes.under_way = num_decodes > 0
        forward = self._forward(chunks)
        seconds = self._seconds(forward, items, part)
        stepped = partial(self._stepped, now_ns, part, forward, len(items), chunks)
        yield from self._device.begin(self.name, seconds, part, now_ns, stepped)

    def _seconds(self, forward: Forward, items: list[Media], part: float) -> float:
        """Of a step that encodes these items first."""
        seconds = self._costs.forward(forward, part)
        if items:
            self._run.encoded(len(items))
            seconds += self._costs.encode(items, part) + self.limits.item_s * len(items)
        return seconds

    def _forward(self, chunks: list[tuple[Sequence, int]]) -> Forward:
        decodes, tokens, pairs, prompts = self._decodes, 0, 0, 0
        for sequence, num in chunks:
            tokens += num
            pairs += num * sequence.num_computed + num * (num + 1) // 2
            prompts += sequence.num_computed + num == sequence.num_to_compute
        num_decodes = len(decodes.running)
        return Forward(tokens, pairs, prompts, num_decodes, decodes.num_tokens + num_decodes)

    def _join_arrived(self) -> None:
        while self._arrived and len(self._running) < self.limits.max_num_seqs:
            sequence = self._arrived.popleft()
            self._running[sequence] = None
            # Its last token is computed (that of a prompt again), which makes the next one.
            num_held = sequence.num_to_compute - 1
            if not self.limits.reserves:
                self._free_blocks += sequence.num_blocks - blocks(num_held)
                sequence.num_blocks = blocks(num_held)
            self._decodes.join(sequence, num_held)

    def _make_room(self) -> bool:
        """For the next token of every decode; whether a sequence had to give way."""
        if self.limits.reserves:
            return False
        preempted = False
        while (num_new := self._decodes.num_new_blocks) > self._free_blocks:
            self._preempt(next(reversed(self._running)))
            preempted = True
        self._free_blocks -= num_new
        return preempted

    def _preempt(self, sequence: Sequence) -> None:
        self._forget(sequence)
        self._run.num_preempted += 1
        sequence.num_computed, sequence.pull_s, sequence.here = 0, None, False
        self._waiting.appendleft(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Out of whatever it is in."""
        if sequence in self._decodes.running:
            self._decodes.leave(sequence)
        if sequence in self._running:
            del self._running[sequence]
            self._prompts.pop(sequence, None)
        for queue in (self._waiting, self._arrived):
            if sequence in queue:
                queue.remove(sequence)
        self._pulling.discard(sequence)
        self._free_blocks += sequence.num_blocks
        sequence.num_blocks = 0

    def _chunk(
        self,
        sequence: Sequence,
        budget: int,
        chunks: list[tuple[Sequence, int]],
        items: list[Media],
    ) -> int:
        """The next tokens of a prompt, and the items among them; how many tokens."""
        num = sequence.num_to_compute - sequence.num_computed
        if len(chunks) >= self.limits.max_prompts:
            return 0
        if self.limits.chunked:
            num = min(num, budget)
        elif num > budget and chunks:
            return 0
        num = self._up_to_items(sequence, num, items)
        if num > 0:
            chunks.append((sequence, num))
        return max(0, num)

    def _up_to_items(self, sequence: Sequence, num: int, items: list[Media]) -> int:
        """Items are encoded in the step in which their first token is computed, as far as the
        encoder's budget goes, which is the step's own or the largest item.
        """
        if sequence.num_encoded == len(sequence.items):
            return num
        budget = self.limits.item_budget or self.limits.token_budget
        budget = max(budget, max(each.num_tokens for each in sequence.items))
        budget -= sum(item.num_tokens for item in items)
        begin = sum(item.num_tokens for item in sequence.items[: sequence.num_encoded])
        for item in sequence.items[sequence.num_encoded :]:
            if begin >= sequence.num_computed + num:
                break
            budget -= item.num_tokens
            if budget < 0:
                return begin - sequence.num_computed
            items.append(item)
            sequence.num_encoded += 1
            begin += item.num_tokens
        return num

    def _admit(
        self,
        budget: int,
        chunks: list[tuple[Sequence, int]],
        items: list[Media],
        now_ns: int,
    ) -> Iterator[Effect]:
        """First come, first served; whoever does not fit holds back those behind."""
        while self._waiting and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            num_blocks = self._blocks_to_admit(sequence)
            if num_blocks > self._free_blocks:
                break
            if sequence.pull_s is not None:
                self._waiting.popleft()
                self._take(sequence, num_blocks)
                yield self._pull(sequence, sequence.pull_s, now_ns)
                continue
            if sequence.here:
                self._waiting.popleft()
                self._take(sequence, num_blocks)
                self._running[sequence] = None
                self._decodes.join(sequence, sequence.num_to_compute - 1)
                continue
            if budget <= 0:
                break
            num = self._chunk(sequence, budget, chunks, items)
            if not num:
                break
            budget -= num
            self._waiting.popleft()
            self._take(sequence, num_blocks)
            self._running[sequence] = None
            self._prompts[sequence] = None

    def _blocks_to_admit(self, sequence: Sequence) -> int:
        """With ``reserves`` those of its answer as well."""
        left = sequence.num_tokens - sequence.num_made
        return blocks(sequence.num_to_compute + (left if self.limits.reserves else 0))

    def _take(self, sequence: Sequence, num_blocks: int) -> None:
        sequence.num_blocks = num_blocks
        self._free_blocks -= num_blocks

    def _pull(self, sequence: Sequence, seconds: float, now_ns: int) -> Effect:
        self._pulling.add(sequence)
        begin_ns, end_ns = self._link.take(seconds, now_ns)
        self._run.note(self.name, "transfer", begin_ns, end_ns, tokens=sequence.num_prompt)
        return end_ns, partial(self._pulled, sequence, self._epoch)

    def _pulled(self, sequence: Sequence, epoch: int, now_ns: int) -> Iterator[Effect]:
        if epoch != self._epoch or sequence not in self._pulling:
            return
        self._pulling.remove(sequence)
        self._arrived.append(sequence)
        yield from sequence.pulled(now_ns)
        yield from self.wake(now_ns)

    def _stepped(
        self,
        begin_ns: int,
        part: float,
        forward: Forward,
        num_items: int,
        chunks: list[tuple[Sequence, int]],
        now_ns: int,
    ) -> Iterator[Effect]:
        num_new, num_decodes = forward.prefill_tokens, forward.num_decodes
        self._run.busy_ns[self.name] += now_ns - begin_ns
        if self._run.traced:
            kind = "mixed" if num_new and num_decodes else "prefill" if num_new else "decode"
            self._run.note(
                self.name,
                kind,
                begin_ns,
                now_ns,
                prefill_tokens=num_new,
                num_decodes=num_decodes,
                items=num_items,
                part=round(part, 3),
            )
        if self.after_step is not None:
            yield from self.after_step(num_decodes, now_ns)
        first, ended = self._decodes.step()
        for sequence in first:
            yield from sequence.first(now_ns)
        for sequence in ended:
            self._decodes.leave(sequence)
            yield from self._done(sequence, now_ns)
        for sequence, num in chunks:
            if sequence in self._prompts:
                yield from self._computed(sequence, num, now_ns)
        self._busy = False  # not before: whoever is told may wake this engine
        part = self._part()
        if part:
            yield from self._step(part, now_ns)

    def _computed(self, sequence: Sequence, num: int, now_ns: int) -> Iterator[Effect]:
        """So many tokens of a prompt; the last of them makes a token."""
        sequence.num_computed += num
        if sequence.num_computed < sequence.num_to_compute:
            return
        del self._prompts[sequence]
        num_held = sequence.num_to_compute
        sequence.num_made += 1
        if sequence.num_made == 1:
            yield from sequence.first(now_ns)
        if sequence.num_made >= sequence.num_tokens:
            yield from self._done(sequence, now_ns)
        else:
            self._decodes.join(sequence, num_held)

    def _done(self, sequence: Sequence, now_ns: int) -> Iterator[Effect]:
        del self._running[sequence]
        del self._sequences[sequence.key]
        if self.limits.holds:
            self._held[sequence.key] = sequence.num_blocks
        else:
            self._free_blocks += sequence.num_blocks
        yield from sequence.done(now_ns)
