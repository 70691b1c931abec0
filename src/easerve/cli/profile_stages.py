"""The stages of a deployment one by one, as its router calls them; ``costs.stages`` is the result.

One engine of each stage runs, none beside another. Everything is new to the engines: texts and
keys of pictures are drawn, so that no cache answers.
"""

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean
from typing import Any, NamedTuple

from easerve.cli import profile_cpu
from easerve.cli.profile_engines import NUM_CALLERS, Item
from easerve.costs.stages import DecodeSteps, EncodeCalls, PrefillCalls, Pulls, Pushes, Renders
from easerve.engines.protocol import EncodeCall, Engine, EngineError, Media, Prefilled, Prompt
from easerve.types import Stage

NUM_WARM_UPS, NUM_RUNS, NUM_DECODE_RUNS, NUM_ATTEMPTS = 3, 20, 4, 4
PREFILL_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 512, 2048)
PAUSE_S = 0.05
"""Before each call, as there is between requests. On a CPU, work right after the same work takes
less time, by up to a half: what it needs is in the caches yet.
"""
NUM_STEPS = 24
RAMP_STEPS = 4, 24  # until another sequence has begun, and until a busy machine lets it
HELD_SHARE = 0.8  # of a KV cache; what is pulled is freed late
CELL = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{(.*)\})? ([-+0-9.eE]+)$", re.MULTILINE)
Used = Callable[[], Mapping[str, float]]
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}
QUEUED, PREFILLED = "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"
TIMES = (QUEUED, PREFILLED)
GAPS = ("inter_token_latency_seconds_sum", "inter_token_latency_seconds_count")


class Sizes(NamedTuple):
    """What is measured of a deployment: as much as its engines hold."""

    batches: Sequence[int]
    prefill: Sequence[int]
    contexts: Sequence[int]
    sequences: Sequence[int]
    kv_tokens: int

    @property
    def decodes(self) -> list[tuple[int, int]]:
        """(sequences, context) that fit into the KV caches."""
        return [
            (sequences, context)
            for context in self.contexts
            for sequences in self.sequences
            if sequences * (context + num_tokens(sequences)) <= HELD_SHARE * self.kv_tokens
        ]


def sizes_of(batches: Sequence[int], max_model_len: int, num_slots: int, kv_tokens: int) -> Sizes:
    """``num_slots``: sequences that prefill and decode both run at once."""
    prefill = [each for each in PREFILL_TOKENS if each < max_model_len] or [max_model_len // 2]
    longest = max_model_len - num_tokens(1) - 1
    sequences = [each for each in SEQUENCES if each <= num_slots]
    contexts = [each for each in CONTEXTS if each <= longest] or [max(1, longest)]
    sequences = [n for n in sequences if contexts[0] + num_tokens(n) < max_model_len] or [1]
    contexts = [each for each in contexts if each + num_tokens(sequences[-1]) < max_model_len]
    return Sizes(sorted(batches), prefill, contexts, sequences, kv_tokens)


def num_tokens(sequences: int) -> int:
    """Of answers, so that all of so many sequences run for ``NUM_STEPS``."""
    each, all_of_them = RAMP_STEPS
    return NUM_STEPS + each * sequences + all_of_them


def cells(metrics: str) -> dict[str, float]:
    """The values of an engine's metrics by name, summed over their labels."""
    found: dict[str, float] = {}
    for name, _, value in CELL.findall(metrics):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def kv_tokens_of(metrics: str) -> int:
    """What an engine's KV cache holds, as its metrics say."""
    for name, labels, _ in CELL.findall(metrics):
        if name == "cache_config_info":
            said = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            return int(said["num_gpu_blocks"]) * int(said["block_size"])
    raise EngineError("the engine does not say how much its KV cache holds")


@dataclass(frozen=True, slots=True)
class Seen:
    """A number of calls: seconds of each, and per call what each process used."""

    wall_s: tuple[float, ...]
    used_s: Mapping[str, float]
    clock_s: Mapping[str, float]
    """By the engine's own clock, see ``QUEUED`` and ``PREFILLED``."""


class StagesBench:
    """``used``: CPU seconds so far, as ``profile_cpu.used_s``. ``words``: tokens of texts."""

    def __init__(
        self,
        engines: Mapping[Stage, Engine],
        item: Item,
        body: Callable[[str], Mapping[str, Any]],
        words: Sequence[int],
        used: Used,
        on_cpu: bool,
        seed: int = 0,
    ) -> None:
        """``body``: of a chat with a picture of this key. With another seed all is new again."""
        self._encoder, self._prefill = engines[Stage.ENCODE], engines[Stage.PREFILL]
        self._decode = engines[Stage.DECODE]
        self._item, self._body, self._words = item, body, words
        self.item_tokens = item.num_tokens
        self._used, self._on_cpu = used, on_cpu
        self._rng = random.Random(seed)  # noqa: S311 (texts, not secrets)
        self._keys = (f"stages-{seed}-{number}" for number in count())

    async def render(self) -> Renders:
        async def call() -> None:
            await self._encoder.render(self._body(next(self._keys)))

        seen = await self._calls(self._encoder, call)
        return Renders(wall_s=seen.wall_s, api_s=seen.used_s[self._encoder.worker_id])

    async def encode(self, batch: int) -> EncodeCalls:
        seen = await self._calls(self._encoder, lambda: self._encode(batch))
        return EncodeCalls(batch=batch, **self._of(self._encoder, seen))

    async def prefill(self, tokens: int) -> PrefillCalls:
        seen = await self._calls(self._prefill, lambda: self._prefill_once(tokens, 1))
        return PrefillCalls(tokens=tokens, **self._of(self._prefill, seen))

    async def crowding(self, alone: PrefillCalls) -> float:
        """By what share prefill's core needs longer while the encoder always has work."""
        ended = False

        async def encode() -> None:
            while not ended:
                await self._encode(1)

        callers = [asyncio.create_task(encode()) for _ in range(NUM_CALLERS)]
        try:
            seen = await self._calls(self._prefill, lambda: self._prefill_once(alone.tokens, 1))
        finally:
            ended = True
            await asyncio.gather(*callers, return_exceptions=True)
        core_s = seen.used_s[profile_cpu.core(self._prefill.worker_id)]
        if not self._on_cpu or not alone.engine_s:
            return 0.0
        return round(max(0.0, core_s / alone.engine_s - 1), 4)

    async def pull(self, alone: PrefillCalls) -> Pulls:
        """``alone``: prefills of as many tokens whose KV cache nobody pulls."""
        walls: list[float] = []

        async def call() -> None:
            prompt, prefilled = await self._prefill_once(alone.tokens, 1, keep=True)
            begin = time.perf_counter()
            async for _ in self._decode.decode(prompt, prefilled.handle):
                pass
            walls.append(time.perf_counter() - begin)

        seen = await self._calls(self._decode, call)
        prefill_s = seen.used_s[profile_cpu.core(self._prefill.worker_id)]
        calls = self._of(self._decode, seen) | {"wall_s": _rounded(walls[NUM_WARM_UPS:])}
        return Pulls(
            tokens=alone.tokens,
            pull_s=_mean(seen.clock_s[QUEUED]),
            handover_s=max(0.0, _mean(prefill_s - alone.engine_s)) if self._on_cpu else 0.0,
            **calls,
        )

    async def push(self, batch: int) -> Pushes:
        """Prefill says what has come when it next answers."""
        usable_s: list[float] = []
        for _ in range(NUM_WARM_UPS + NUM_RUNS // 2):
            await self._encode(batch, self._prefill)
            _, prefilled = await self._prefill_once(PREFILL_TOKENS[0], 1)
            usable_s += [each.usable_s for each in prefilled.bundles if each.num_items == batch]
        if len(usable_s) <= NUM_WARM_UPS:
            raise EngineError("prefill does not say what was pushed to it")
        tokens = batch * self._item.num_tokens
        return Pushes(items=batch, tokens=tokens, usable_s=_rounded(usable_s[NUM_WARM_UPS:]))

    async def decode(self, sequences: int, context: int) -> DecodeSteps:
        """Between the last sequence's first token and the first one's end, or ``NUM_STEPS``."""
        await self._together(sequences, context)
        runs = [await self._together(sequences, context) for _ in range(NUM_DECODE_RUNS)]
        steps = sum(run.num_steps for run in runs)
        name = self._decode.worker_id
        step_s = [run.wall_s / run.num_steps for run in runs]
        core_s = sum(run.used_s[profile_cpu.core(name)] for run in runs) / steps
        return DecodeSteps(
            sequences=sequences,
            context=context,
            step_s=_rounded(step_s),
            engine_s=_mean(core_s if self._on_cpu else fmean(step_s)),
            api_s=_mean(sum(run.used_s[name] for run in runs) / steps),
        )

    async def _together(self, sequences: int, context: int) -> "_Window":
        """Once more where another process kept one of them back until another had ended, or us from
        reading what had come: tokens then seem to be quicker than their engine made them.
        """
        for _ in range(NUM_ATTEMPTS):
            told = cells(await self._decode.metrics())
            window = await self._decode_run(sequences, context)
            now = cells(await self._decode.metrics())
            gap_s, gaps = (now.get(name, 0.0) - told.get(name, 0.0) for name in GAPS)
            if window.num_steps and window.wall_s * gaps > gap_s * window.num_steps / 2:
                return window
        raise EngineError(f"{sequences} sequences did not run together: the machine is too busy")

    async def _decode_run(self, sequences: int, context: int) -> "_Window":
        length = num_tokens(sequences)
        middle = max(1, context - NUM_STEPS // 2)
        kept = [await self._prefill_once(middle, length, keep=True) for _ in range(sequences)]
        window = _Window(sequences, self._used)

        async def answer(number: int, prompt: Prompt, prefilled: Prefilled) -> None:
            async for delta in self._decode.decode(prompt, prefilled.handle):
                window.count(number, len(delta.token_ids))
            window.end()

        await asyncio.gather(*(answer(number, *each) for number, each in enumerate(kept)))
        return window

    # Calls ------------------------------------------------------------------------------------

    async def _calls(self, engine: Engine, call: Callable[[], Awaitable[object]]) -> Seen:
        for _ in range(NUM_WARM_UPS):
            await call()
        told, before, walls = cells(await engine.metrics()), self._used(), []
        for _ in range(NUM_RUNS):
            await asyncio.sleep(PAUSE_S)
            begin = time.perf_counter()
            await call()
            walls.append(time.perf_counter() - begin)
        used_s = profile_cpu.since(before, self._used())
        now = cells(await engine.metrics())
        return Seen(
            _rounded(walls),
            {name: _mean(each / NUM_RUNS) for name, each in used_s.items()},
            {name: (now.get(name, 0.0) - told.get(name, 0.0)) / NUM_RUNS for name in TIMES},
        )

    def _of(self, engine: Engine, seen: Seen) -> dict[str, Any]:
        core_s = seen.used_s[profile_cpu.core(engine.worker_id)]
        return {
            "wall_s": seen.wall_s,
            "engine_s": core_s if self._on_cpu else _mean(seen.clock_s[PREFILLED]),
            "api_s": seen.used_s[engine.worker_id],
        }

    async def _encode(self, batch: int, *destinations: Engine) -> None:
        names = tuple(engine.worker_id for engine in destinations)
        calls = [
            EncodeCall(Media(key, "image_url", self._item.url), self._item.placeholder, names)
            for key in (next(self._keys) for _ in range(batch))
        ]
        await self._encoder.encode(calls)

    async def _prefill_once(
        self, tokens: int, max_tokens: int, keep: bool = False
    ) -> tuple[Prompt, Prefilled]:
        """``keep``: its KV cache, for decode, to which the prompt goes as it is given back."""
        words = self._rng.choices(self._words, k=tokens)
        # Prefill itself answers where one token is all.
        asked = Prompt(words, {**GREEDY, "max_tokens": 1 + max_tokens if keep else max_tokens})
        prefilled = await self._prefill.prefill(asked, ())
        return Prompt(words, {**GREEDY, "max_tokens": max_tokens}), prefilled


class _Window:
    """The time in which all of some sequences run. Tokens are counted as they come."""

    def __init__(self, sequences: int, used: Used) -> None:
        self._counts, self._used, self._over = [0] * sequences, used, False
        self._begin: tuple[float, Mapping[str, float], list[int]] | None = None
        self.num_steps, self.wall_s = 0.0, 0.0
        self.used_s: Mapping[str, float] = {}

    def count(self, number: int, tokens: int) -> None:
        self._counts[number] += tokens
        if self._begin is None and min(self._counts):
            self._begin = time.perf_counter(), self._used(), list(self._counts)
        elif min(self._grown()) >= NUM_STEPS:
            self.end()

    def end(self) -> None:
        """One sequence has ended, or has made enough."""
        if self._over:
            return
        self._over = True
        if self._begin is not None:
            begin, before, _ = self._begin
            self.num_steps, self.wall_s = fmean(self._grown()), time.perf_counter() - begin
            self.used_s = profile_cpu.since(before, self._used())

    def _grown(self) -> list[int]:
        then = self._counts if self._begin is None else self._begin[2]
        return [now - before for now, before in zip(self._counts, then, strict=True)]


def _mean(seconds: float) -> float:
    return round(seconds, 7)


def _rounded(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(each, 6) for each in seconds)
