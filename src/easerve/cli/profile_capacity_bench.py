"""Requests per second of one engine of a stage that has nothing else to do, on running engines.

Each stage is asked without end for what it does of a request of the workload. Everything is new to
the engines, so that no cache answers. Prefill gets texts that are as long as a request with its
pictures, whose embeddings would keep the encoder busy meanwhile. What decode pulls is prefilled
before the clock starts.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean, median

from easerve.cli.bench.cpu_stages import closed_loop
from easerve.cli.profile_engines import NUM_CALLERS
from easerve.cli.profile_service import Content
from easerve.cli.profile_stages import GREEDY, HELD_SHARE, kv_tokens_of
from easerve.engines.protocol import EncodeCall, Engine, Media, Prefilled, Prompt
from easerve.search.capacity import Cell, Row
from easerve.types import Stage

NUM_WARM_UPS, NUM_ALONE = 2, 5
UNDER_LOAD_S = 1.0
LEAST_ROUNDS = 4
"""Of a closed loop, whatever its calls take: its callers do not all end at once."""
NUM_WAVES = 3
"""Of sequences whose KV cache prefill holds for one decode loop, if it can."""
NUM_KEEPERS = 16
"""Prompts that are prefilled for decode at once; more would not notice in time that it ends."""
KEEP_S = 10.0
"""Prefilling for decode ends then: vLLM frees a KV cache that nobody pulls after 30 s. Nor is it
begun again, where prefill takes much longer than decode.
"""
BLOCK_TOKENS = 16
Call = Callable[[], Awaitable[object]]


class LeftOutError(Exception):
    """This cell cannot be measured, though others can; the text says why."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of every request: pictures of one size in pixels; tokens of text and answer."""

    num_items: int
    size: tuple[int, int]
    text_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        width, height = self.size
        s = "" if self.num_items == 1 else "s"
        return (
            f"{self.num_items} picture{s} of {width}x{height}, {self.text_tokens} tokens of text, "
            f"{self.output_tokens} of an answer"
        )

    def nothing(self, cell: Cell) -> Row | None:
        """The row of a stage of which such a request asks nothing."""
        encode = cell.stage is Stage.ENCODE and not self.num_items
        decode = cell.stage is Stage.DECODE and self.output_tokens == 1  # prefill answers
        return Row(*cell, math.inf, 0.0) if encode or decode else None


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the engines that run: tokens of a request, of an encoder's call, of the KV caches."""

    max_model_len: int
    encode_tokens: int
    kv_tokens: Mapping[Stage, int]


async def limits_of(engines: Mapping[Stage, Engine], max_model_len: int) -> Limits:
    held = {
        stage: kv_tokens_of(await engines[stage].metrics())
        for stage in (Stage.PREFILL, Stage.DECODE)
    }
    return Limits(max_model_len, engines[Stage.ENCODE].max_batch_tokens, held)


@dataclass
class CapacityBench:
    """One engine of each stage. ``seed``: with another one all is new again."""

    engines: Mapping[Stage, Engine]
    content: Content
    limits: Limits
    workload: Workload
    seed: int = 0
    _rng: random.Random = field(init=False, repr=False)
    _numbers: "count[int]" = field(init=False, repr=False, default_factory=count)
    # Decode is measured without prefill's help, but not without what that made before.
    _prefill_is_free: asyncio.Lock = field(init=False, repr=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)  # noqa: S311 (texts, not secrets)

    @property
    def prompt_tokens(self) -> int:
        """Of a chat with its pictures and its text."""
        pictures = self.workload.num_items * self.content.item.num_tokens
        return self.content.frame_tokens + pictures + self.workload.text_tokens

    @property
    def _held_tokens(self) -> int:
        """Of a KV cache, by a request while it is decoded; whole blocks."""
        return BLOCK_TOKENS + self.prompt_tokens + self.workload.output_tokens

    def _why_not(self, cell: Cell) -> str | None:
        """Why the engines cannot hold this; None: they can."""
        if cell.stage is Stage.ENCODE:
            tokens, most = cell.batch * self.content.item.num_tokens, self.limits.encode_tokens
            return None if tokens <= most else f"a call of {tokens} tokens, it holds {most}"
        tokens = self.prompt_tokens + self.workload.output_tokens
        if tokens > self.limits.max_model_len:
            return f"a request of {tokens} tokens, max_model_len is {self.limits.max_model_len}"
        if cell.stage is Stage.DECODE:
            fits = min(self._fits(Stage.PREFILL), self._fits(Stage.DECODE))
            return None if cell.batch <= fits else f"the KV caches hold {fits} requests"
        return None

    def _fits(self, stage: Stage) -> int:
        return int(HELD_SHARE * self.limits.kv_tokens[stage]) // self._held_tokens

    async def row(self, cell: Cell) -> Row:
        """Raises LeftOutError, EngineError."""
        if why := self._why_not(cell):
            raise LeftOutError(why)
        if cell.stage is Stage.ENCODE:
            return await self._encode_row(cell)
        if cell.stage is Stage.PREFILL:
            async with self._prefill_is_free:
                return await self._prefill_row(cell)
        return await self._decode_row(cell)

    # Encode -----------------------------------------------------------------------------------

    async def _encode_row(self, cell: Cell) -> Row:
        """A call alone for the seconds; for the rate one more is sent ahead, as in a service."""
        call = partial(self._encode, cell.batch)
        _, walls = await _looped([call] * (NUM_WARM_UPS + NUM_ALONE), 1)
        calls_per_s, _ = await _under_load(call, NUM_CALLERS)
        per_s = calls_per_s * cell.batch / self.workload.num_items
        return _row(cell, per_s, median(walls[NUM_WARM_UPS:]))

    async def _encode(self, batch: int) -> None:
        item = self.content.item
        keys = (f"capacity-{self.seed}-{next(self._numbers)}" for _ in range(batch))
        calls = [
            EncodeCall(Media(key, "image_url", item.url), item.placeholder, ()) for key in keys
        ]
        await self.engines[Stage.ENCODE].encode(calls)

    # Prefill ----------------------------------------------------------------------------------

    async def _prefill_row(self, cell: Cell) -> Row:
        per_s, walls = await _under_load(partial(self._prefill, 1), cell.batch)
        return _row(cell, per_s, fmean(walls))

    async def _prefill(self, max_tokens: int) -> tuple[Sequence[int], Prefilled]:
        """The text, and what came of it: with one token the answer, and no KV cache is kept."""
        words = self._rng.choices(self.content.words, k=self.prompt_tokens)
        prompt = Prompt(words, {**GREEDY, "max_tokens": max_tokens})
        return words, await self.engines[Stage.PREFILL].prefill(prompt, ())

    # Decode -----------------------------------------------------------------------------------

    async def _decode_row(self, cell: Cell) -> Row:
        await self._decode_loop(1)
        num, wall_s, steps = 0, 0.0, _Steps()
        begin = time.perf_counter()
        while not num or (wall_s < UNDER_LOAD_S and time.perf_counter() < begin + KEEP_S):
            decoded, took_s = await self._decode_loop(cell.batch, steps)
            num, wall_s = num + decoded, wall_s + took_s
        return _row(cell, num / wall_s, steps.mean_s)

    async def _decode_loop(
        self, sequences: int, steps: "_Steps | None" = None
    ) -> tuple[int, float]:
        """How many requests were decoded, so many at once, and in how many seconds."""
        kept = await self._kept(sequences)
        calls = [partial(self._decode, *each, steps or _Steps()) for each in kept]
        wall_s, _ = await _looped(calls, sequences)
        return len(kept), wall_s

    async def _kept(self, sequences: int) -> list[tuple[Prompt, Prefilled]]:
        """Requests whose KV cache prefill holds: some rounds of them, at least one."""
        most = min(NUM_WAVES * sequences, self._fits(Stage.PREFILL))
        kept: list[tuple[Prompt, Prefilled]] = []
        async with self._prefill_is_free:
            begin = time.perf_counter()

            async def keep() -> None:
                if time.perf_counter() < begin + KEEP_S:
                    words, prefilled = await self._prefill(1 + self.workload.output_tokens)
                    sampling = {**GREEDY, "max_tokens": self.workload.output_tokens}
                    kept.append((Prompt(words, sampling), prefilled))

            slots = self.engines[Stage.PREFILL].num_slots
            await closed_loop([keep] * most, min(slots, NUM_KEEPERS))
        if len(kept) >= sequences:
            return kept
        decode = self.engines[Stage.DECODE]
        await asyncio.gather(*(decode.release(each, made.handle) for each, made in kept))
        raise LeftOutError(
            f"prefill made {len(kept)} of {sequences} prompts for it in {KEEP_S:g} s, and does not "
            "keep them for long"
        )

    async def _decode(self, prompt: Prompt, prefilled: Prefilled, steps: "_Steps") -> None:
        first_s: float | None = None
        async for delta in self.engines[Stage.DECODE].decode(prompt, prefilled.handle):
            last_s = time.perf_counter()
            if first_s is None:
                first_s = last_s
            else:
                steps.num += len(delta.token_ids)
        if first_s is not None:
            steps.wall_s += last_s - first_s


@dataclass(slots=True)
class _Steps:
    """Tokens after each first piece of an answer, and the seconds that they took."""

    num: int = 0
    wall_s: float = 0.0

    @property
    def mean_s(self) -> float:
        return self.wall_s / self.num if self.num else 0.0


async def _under_load(call: Call, callers: int) -> tuple[float, list[float]]:
    """Calls per second in a closed loop of so many callers, and the seconds of each."""
    for _ in range(NUM_WARM_UPS):
        round_s, _ = await _looped([call] * callers, callers)
    num = callers * max(LEAST_ROUNDS, math.ceil(UNDER_LOAD_S / round_s))
    wall_s, walls = await _looped([call] * num, callers)
    return num / wall_s, walls


async def _looped(calls: Sequence[Call], callers: int) -> tuple[float, list[float]]:
    walls: list[float] = []

    async def timed(call: Call) -> None:
        begin = time.perf_counter()
        await call()
        walls.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    await closed_loop([partial(timed, call) for call in calls], callers)
    return time.perf_counter() - begin, walls


def _row(cell: Cell, per_s: float, seconds: float) -> Row:
    return Row(*cell, float(f"{per_s:.6g}"), round(seconds, 7))
