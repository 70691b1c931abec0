"""The dumb oracle of the modelled language-model engine: every sequence and token one by one.

It keeps the rules of ``sim/llm.py`` and none of its shortcuts: blocks are counted for each sequence
anew, and a step goes through all tokens that it computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from easerve.costs.base import Costs, Forward, Media
from easerve.sim.llm import LlmLimits
from easerve.sim.sequences import BLOCK_TOKENS
from easerve.types import NS_PER_S


class Happened(NamedTuple):
    """``what``: first, done, pulled, or step with its forward and the free blocks at its begin."""

    at_ns: int
    what: str
    key: int
    forward: Forward | None = None
    num_free: int = 0


@dataclass(eq=False, slots=True)
class Naive:
    """A sequence. ``computed``: tokens in its KV cache; ``blocks``: that it has."""

    key: int
    prompt: int
    want: int
    items: tuple[Media, ...] = ()
    pull_s: float | None = None
    made: int = 0
    computed: int = 0
    blocks: int = 0
    encoded: set[int] = field(default_factory=set)
    decoding: bool = False

    @property
    def total(self) -> int:
        return self.prompt + self.made


class NaiveEngine:
    def __init__(self, limits: LlmLimits, costs: Costs) -> None:
        self.limits, self.costs = limits, costs
        self.waiting: list[Naive] = []
        self.arrived: list[Naive] = []
        self.running: list[Naive] = []
        self.pulls: list[tuple[int, Naive]] = []
        self.held: dict[int, int] = {}
        self.link_free_ns = 0
        self.step_end_ns: int | None = None
        self.stepping: list[Naive] = []
        self.chunks: list[tuple[Naive, int]] = []
        self.story: list[Happened] = []
        self.num_preempted = 0

    def run(self, asked: Sequence[tuple[int, Callable[["NaiveEngine"], None]]]) -> None:
        """``asked``: what is done to it from outside, and when (ns); no two at one time."""
        todo = sorted(asked, key=lambda each: each[0])
        while True:
            times = [todo[0][0]] if todo else []
            times += [] if self.step_end_ns is None else [self.step_end_ns]
            times += [at_ns for at_ns, _ in self.pulls]
            if not times:
                return
            now_ns = min(times)
            if todo and todo[0][0] == now_ns:
                todo.pop(0)[1](self)
            elif self.step_end_ns == now_ns:
                self._end_step(now_ns)
            else:
                pull = min(self.pulls, key=lambda pull: pull[0])
                self.pulls.remove(pull)
                self.story.append(Happened(now_ns, "pulled", pull[1].key))
                self.arrived.append(pull[1])
            while self.step_end_ns is None and self._begin_step(now_ns):
                pass

    def submit(self, sequence: Naive) -> None:
        self.waiting.append(sequence)

    def abort(self, key: int) -> None:
        self.held.pop(key, None)
        for queue in (self.waiting, self.arrived, self.running, self.stepping):
            queue[:] = [each for each in queue if each.key != key]
        self.pulls = [pull for pull in self.pulls if pull[1].key != key]
        self.chunks = [chunk for chunk in self.chunks if chunk[0].key != key]

    def release(self, key: int) -> None:
        self.held.pop(key, None)

    @property
    def free(self) -> int:
        taken = [*self.arrived, *self.running, *(sequence for _, sequence in self.pulls)]
        num = sum(each.blocks for each in taken) + sum(self.held.values())
        return self.limits.num_blocks - num

    def _begin_step(self, now_ns: int) -> bool:
        """Whether to try once more, as everything had to give way."""
        limits = self.limits
        while self.arrived and len(self.running) < limits.max_num_seqs:
            sequence = self.arrived.pop(0)
            sequence.computed, sequence.decoding = sequence.total - 1, True
            if not limits.reserves:
                sequence.blocks = _blocks(sequence.computed)
            self.running.append(sequence)
        preempted = False
        while not limits.reserves and self._num_wanted() > self.free:
            sequence = self.running.pop()
            sequence.computed = sequence.blocks = 0
            sequence.decoding, sequence.pull_s = False, None
            self.waiting.insert(0, sequence)
            self.num_preempted += 1
            preempted = True
        decodes = [each for each in self.running if each.decoding]
        if not limits.reserves:
            for each in decodes:
                each.blocks = max(each.blocks, _blocks(each.computed + 1))
        self.chunks, items = [], list[Media]()
        budget = limits.token_budget - len(decodes)
        for sequence in self.running:
            if not sequence.decoding:
                budget -= self._chunk(sequence, budget, items)
        if not preempted:
            self._admit(budget, items, now_ns)
        if not self.chunks and not decodes:
            return preempted
        self.stepping = decodes
        forward = self._forward()
        seconds = self.costs.forward(forward)
        if items:
            seconds += self.costs.encode(items) + limits.item_s * len(items)
        self.step_end_ns = now_ns + round(seconds * NS_PER_S)
        self.story.append(Happened(now_ns, "step", -1, forward, self.free))
        return False

    def _num_wanted(self) -> int:
        decodes = (each for each in self.running if each.decoding)
        return sum(max(0, _blocks(each.computed + 1) - each.blocks) for each in decodes)

    def _admit(self, budget: int, items: list[Media], now_ns: int) -> None:
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            left = sequence.want - sequence.made if self.limits.reserves else 0
            blocks = _blocks(sequence.total + left)
            if blocks > self.free:
                return
            if sequence.pull_s is not None:
                begin_ns = max(now_ns, self.link_free_ns)
                self.link_free_ns = begin_ns + round(sequence.pull_s * NS_PER_S)
                self.pulls.append((self.link_free_ns, self.waiting.pop(0)))
                sequence.blocks = blocks
                continue
            num = self._chunk(sequence, budget, items) if budget > 0 else 0
            if not num:
                return
            budget -= num
            sequence.blocks = blocks
            self.running.append(self.waiting.pop(0))

    def _chunk(self, sequence: Naive, budget: int, items: list[Media]) -> int:
        limits, num = self.limits, 0
        most = sequence.total - sequence.computed
        if len(self.chunks) == limits.max_prompts:
            return 0
        if limits.chunked:
            most = min(most, budget)
        elif most > budget and self.chunks:
            return 0
        begins = [0, *accumulate(item.num_tokens for item in sequence.items)]
        while num < most:
            position = sequence.computed + num
            for index, item in enumerate(sequence.items):
                if begins[index] == position and index not in sequence.encoded:
                    room = limits.item_budget or limits.token_budget
                    room = max(room, *(each.num_tokens for each in sequence.items))
                    if sum(each.num_tokens for each in items) + item.num_tokens > room:
                        most = num
                        break
                    items.append(item)
                    sequence.encoded.add(index)
            num += num < most
        if num:
            self.chunks.append((sequence, num))
        return num

    def _forward(self) -> Forward:
        tokens = [
            (sequence.computed + number + 1, sequence.total)
            for sequence, num in self.chunks
            for number in range(num)
        ]
        return Forward(
            len(tokens),
            sum(position for position, _ in tokens),
            sum(position == total for position, total in tokens),
            len(self.stepping),
            sum(each.computed + 1 for each in self.stepping),
        )

    def _end_step(self, now_ns: int) -> None:
        self.step_end_ns = None
        firsts = [each for each in self.stepping if each.made == 0]
        for sequence in self.stepping:
            sequence.made += 1
            sequence.computed += 1
        self.story += [Happened(now_ns, "first", each.key) for each in firsts]
        for sequence in self.stepping:
            if sequence.made == sequence.want:
                self._done(sequence, now_ns)
        for sequence, num in self.chunks:
            sequence.computed += num
            if sequence.computed < sequence.total:
                continue
            sequence.made += 1
            sequence.decoding = True
            if sequence.made == 1:
                self.story.append(Happened(now_ns, "first", sequence.key))
            if sequence.made == sequence.want:
                self._done(sequence, now_ns)

    def _done(self, sequence: Naive, now_ns: int) -> None:
        self.running.remove(sequence)
        self.story.append(Happened(now_ns, "done", sequence.key))
        if self.limits.holds:
            self.held[sequence.key] = sequence.blocks


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)
