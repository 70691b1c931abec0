"""Sequences of a language model, and those that decode as a group, whose sums follow from steps."""

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from easerve.costs.base import Media
from easerve.sim.clock import Effect, Handler

BLOCK_TOKENS = 16


def nothing(now_ns: int) -> Iterator[Effect]:
    yield from ()


@dataclass(eq=False, slots=True)
class Sequence:
    """``num_tokens``: that are to be made. ``first``, ``done``: what follows from its first and
    last one. ``items``: that this engine encodes itself, before the text. ``pull_s``: its KV cache
    is pulled from elsewhere, which takes so long, and ``pulled`` follows. ``here``: it has been
    pulled already. ``num_made``: tokens that were made elsewhere count as the first of its own.
    """

    key: Hashable
    num_prompt: int
    num_tokens: int
    done: Handler
    first: Handler = nothing
    items: tuple[Media, ...] = ()
    pull_s: float | None = None
    pulled: Handler = nothing
    here: bool = False
    num_made: int = 0
    num_computed: int = 0
    num_blocks: int = 0
    num_encoded: int = 0
    joined: int = -1
    """The step after which it decodes."""
    held: int = 0
    """Tokens in its KV cache then."""
    end: int = -1
    """The number of its end, of those that are expected."""

    @property
    def num_to_compute(self) -> int:
        return self.num_prompt + self.num_made


@dataclass(slots=True)
class Decodes:
    """The sequences that decode, as a group; sums follow from the number of steps."""

    num_steps: int = 0
    num_tokens: int = 0
    """In their KV caches."""
    under_way: bool = False
    """Whether a step is, for which blocks have been taken."""
    running: dict[Sequence, None] = field(default_factory=dict)
    phases: Counter[int] = field(default_factory=Counter)
    """How many have (tokens - steps) % BLOCK_TOKENS, which stays the same."""
    ends: list[tuple[int, int, Sequence]] = field(default_factory=list)
    fresh: list[Sequence] = field(default_factory=list)
    """Those that have made nothing yet."""
    numbers: Iterator[int] = field(default_factory=count)

    def join(self, sequence: Sequence, num_held: int) -> None:
        sequence.joined, sequence.held = self.num_steps, num_held
        self.running[sequence] = None
        self.num_tokens += num_held
        self.phases[(num_held - self.num_steps) % BLOCK_TOKENS] += 1
        sequence.end = next(self.numbers)
        last = self.num_steps + sequence.num_tokens - sequence.num_made
        heappush(self.ends, (last, sequence.end, sequence))
        if not sequence.num_made:
            self.fresh.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Its tokens are counted from now on by itself."""
        del self.running[sequence]
        num_steps = self.num_steps - sequence.joined
        self.num_tokens -= sequence.held + num_steps
        self.phases[(sequence.held - sequence.joined) % BLOCK_TOKENS] -= 1
        sequence.num_made += num_steps
        num_held = sequence.held + num_steps + self.under_way
        sequence.num_blocks = max(sequence.num_blocks, blocks(num_held))
        if not num_steps and sequence in self.fresh:
            self.fresh.remove(sequence)

    @property
    def num_new_blocks(self) -> int:
        """That the next step needs."""
        return self.phases[-self.num_steps % BLOCK_TOKENS]

    def step(self) -> tuple[list[Sequence], list[Sequence]]:
        """A token for each: those whose first it was, those whose last."""
        self.num_steps += 1
        self.under_way = False
        self.num_tokens += len(self.running)
        first, self.fresh = self.fresh, []
        ended: list[Sequence] = []
        while self.ends and self.ends[0][0] <= self.num_steps:
            _, end, sequence = heappop(self.ends)
            # One that has left, and perhaps joined again, has another end or none.
            if sequence in self.running and end == sequence.end:
                ended.append(sequence)
        return first, ended


def blocks(num_tokens: int) -> int:
    """KV blocks of so many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)
