"""Engines without a model: the same protocol, paced by a cost model, strict about its rules.

They let the whole server run in tests without vLLM. An embedding is a real file in the folder that
the router names; a KV handle is used once; both are counted, so that a leak or a second use shows.
The answer is a function of the prompt and of the pictures, so that a mix-up shows, too.
"""

import asyncio
import contextlib
import hashlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from easerve.costs.linear import LinearCosts
from easerve.engines.protocol import (
    Delta,
    EmbeddingMissingError,
    EncodeCall,
    EngineError,
    Prefilled,
    Prompt,
)
from easerve.types import MediaItem, Modality, Stage, WorkerId

TOKENS_PER_ITEM = 4
PLACEHOLDER = 1
INSTANT = LinearCosts(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class Fabric:
    """What connects the fake engines: the KV caches that prefill holds, by handle.

    ``uses``: how often each handle was shown to a decode engine; more than once is wrong.
    """

    kv: dict[int, str] = field(default_factory=dict)
    uses: Counter[int] = field(default_factory=Counter)
    handles: "count[int]" = field(default_factory=count)


def words(text: str, keys: Sequence[str]) -> list[str]:
    """The answer to a prompt with these pictures, word by word."""
    digest = hashlib.sha256("|".join([text, *keys]).encode()).hexdigest()
    return [f" w{digest[i : i + 4]}" for i in range(0, 64, 4)]


def publish(call: EncodeCall) -> None:
    """Leave the embedding where prefill looks for it; a folder that is gone is nobody's."""
    with contextlib.suppress(FileNotFoundError):
        Path(call.folder, f"{call.media.key}.json").touch()


class FakeEngine:
    """One stage, which does as it is told.

    ``failures``, by the method: raised by its next calls in turn. ``permits``, by the method: each
    of its calls, and each token of decode, waits for one. ``dead``: every call fails.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        stage: Stage,
        fabric: Fabric,
        costs: LinearCosts = INSTANT,
    ) -> None:
        self.worker_id, self.stage = worker_id, stage
        self._fabric, self._costs = fabric, costs
        self.failures: defaultdict[str, list[Exception]] = defaultdict(list)
        self.permits: dict[str, asyncio.Semaphore] = {}
        self.dead = False
        self.running = 0
        self.calls: Counter[str] = Counter()
        self.encode_calls: list[int] = []

    def _begin(self, call: str) -> None:
        self.calls[call] += 1
        self._check(call)

    def _check(self, call: str) -> None:
        if self.dead:
            raise EngineError(f"{self.worker_id} is dead")
        if self.failures[call]:
            raise self.failures[call].pop(0)

    async def render(self, body: Mapping[str, Any]) -> Prompt:
        self._begin("render")
        await self._work("render", 0.0)
        text, keys = str(body.get("prompt", "")).split(), []
        for message in body.get("messages", ()):
            parts = message["content"]
            for part in [{"type": "text", "text": parts}] if isinstance(parts, str) else parts:
                if part["type"] == "text":
                    text += str(part["text"]).split()
                else:
                    keys.append(part["uuid"])
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        place = [
            {"offset": i * TOKENS_PER_ITEM, "length": TOKENS_PER_ITEM} for i in range(len(keys))
        ]
        features = {"mm_hashes": {"image": keys}, "mm_placeholders": {"image": place}}
        return Prompt(
            [PLACEHOLDER] * TOKENS_PER_ITEM * len(keys) + [10 + len(word) for word in text],
            {"max_tokens": limit, "prompt": " ".join(text)},
            features if keys else None,
            tuple(MediaItem(key, Modality.IMAGE, TOKENS_PER_ITEM) for key in keys),
            (PLACEHOLDER,) * len(keys),
        )

    async def encode(self, calls: Sequence[EncodeCall]) -> None:
        self._begin("encode")
        self.encode_calls.append(len(calls))
        await self._work("encode", self._costs.encode_s(len(calls), TOKENS_PER_ITEM * len(calls)))
        for call in calls:
            publish(call)

    async def prefill(self, prompt: Prompt, folder: Path | None) -> Prefilled:
        self._begin("prefill")
        for item in prompt.items:
            if folder is None or not (folder / f"{item.key}.json").exists():
                raise EmbeddingMissingError(f"no embedding of {item.key}", 500)
        await self._work("prefill", self._costs.prefill_s(len(prompt.token_ids)))
        answer = words(str(prompt.sampling["prompt"]), [item.key for item in prompt.items])
        if prompt.max_new_tokens <= 1:
            return Prefilled(answer=Delta(answer[0], (100,), "length"))
        handle = next(self._fabric.handles)
        self._fabric.kv[handle] = "".join(answer)
        return Prefilled({"handle": handle}, load_s=0.0)

    async def decode(self, prompt: Prompt, handle: Mapping[str, Any]) -> AsyncIterator[Delta]:
        self._fabric.uses[handle["handle"]] += 1
        self._begin("decode")
        kv = self._fabric.kv.pop(handle["handle"], None)
        if kv is None:
            raise EngineError("a KV handle was used twice", 500)
        pieces = [f" {word}" for word in kv.split()][: prompt.max_new_tokens]
        for number, piece in enumerate(pieces, 1):
            await self._work("decode", self._costs.decode_s(1))
            self._check("decode")
            last = number == len(pieces)
            whole = number < prompt.max_new_tokens
            reason = ("stop" if whole else "length") if last else None
            yield Delta(piece, (99 + number,), reason)

    async def _work(self, call: str, seconds: float) -> None:
        self.running += 1
        try:
            if call in self.permits:
                await self.permits[call].acquire()
            await asyncio.sleep(seconds)
        finally:
            self.running -= 1

    async def health(self) -> bool | None:
        return not self.dead

    async def metrics(self) -> str:
        return ""

    async def close(self) -> None:
        return None
