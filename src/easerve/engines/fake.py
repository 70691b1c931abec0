"""Engines without a model: the same protocol, paced by a cost model, strict about its rules.

They let the whole server run in tests without vLLM. An embedding must be pushed to the engine that
prefills with it; a KV handle is used once; both are counted, so that a leak or a second use shows.
The answer is a function of prompt, pictures and seed, so that a mix-up shows, too.
"""

import asyncio
import contextlib
import hashlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from easerve.costs.linear import LinearCosts
from easerve.engines.protocol import (
    Bundle,
    Delta,
    Division,
    EmbeddingMissingError,
    EncodeCall,
    Encoded,
    EngineError,
    Prefilled,
    Prompt,
    Route,
)
from easerve.policy.partition import SHARED, Demand
from easerve.types import MediaItem, Modality, Stage, WorkerId

TOKENS_PER_ITEM = 4
BYTES_PER_ITEM = 1024
GRACE_S = 0.05
PLACEHOLDER = 1
FIRST_TOKEN = 100
# What the fake engines read in a request's body; vLLM turns a format into structured outputs.
SAMPLING = ("seed", "structured_outputs")
INSTANT = LinearCosts(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class KvCache:
    """Of this text, with these pictures in it."""

    text: str
    keys: tuple[str, ...]


class Store:
    """The embeddings that a prefill engine has: the last ``capacity`` that came, by key."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.keys: dict[str, None] = {}
        self._evicted: list[str] = []
        self._bundles: list[Bundle] = []
        self._arrived = asyncio.Condition()

    async def push(self, keys: Sequence[str]) -> None:
        """A bundle comes."""
        self._bundles.append(Bundle(len(keys), BYTES_PER_ITEM * len(keys), 0.0))
        async with self._arrived:
            self.keys |= dict.fromkeys(keys)
            while len(self.keys) > self._capacity:
                self.lose(next(iter(self.keys)))
            self._arrived.notify_all()

    def lose(self, key: str) -> None:
        """Evict one."""
        del self.keys[key]
        self._evicted.append(key)

    async def missing(self, keys: Collection[str], timeout_s: float) -> tuple[str, ...]:
        """What has not come in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._arrived:
                await self._arrived.wait_for(lambda: self.keys.keys() >= set(keys))
        return tuple(key for key in keys if key not in self.keys)

    def news(self) -> tuple[tuple[Bundle, ...], tuple[str, ...]]:
        """Bundles that came and keys that went since it was last asked."""
        news = tuple(self._bundles), tuple(self._evicted)
        self._bundles, self._evicted = [], []
        return news


@dataclass(slots=True)
class Fabric:
    """What connects the fake engines: embeddings by who has them, KV caches by handle.

    ``stores``: of the prefill engines that are there. ``uses``: how often each handle was pulled;
    more than once is wrong.
    """

    stores: dict[WorkerId, Store] = field(default_factory=dict)
    kv: dict[int, KvCache] = field(default_factory=dict)
    uses: Counter[int] = field(default_factory=Counter)
    handles: "count[int]" = field(default_factory=count)


def words(text: str, keys: Sequence[str], seed: int | None = None) -> list[str]:
    """The answer to a prompt with these pictures, word by word."""
    seeds = [] if seed is None else [str(seed)]
    digest = hashlib.sha256("|".join([text, *keys, *seeds]).encode()).hexdigest()
    return [f" w{digest[i : i + 4]}" for i in range(0, 64, 4)]


class FakeEngine:
    """One stage, which does as it is told.

    ``failures``, by the method: raised by its next calls in turn. ``permits``, by the method: each
    of its calls, and each token of decode, waits for one. ``dead``: every call fails.
    ``num_pieces``: that decode has given. ``refused``, ``deadly``: keys of pictures; a call to
    encode with one of them is refused, or the engine dies of it. ``encoded``: how often each was,
    ``resent``: how often it was pushed again without a forward. ``lost``: keys whose next push gets
    lost. ``cache_items``: embeddings that it keeps. ``timeout_s``: that prefill waits for them.
    ``demands``: of its device, in turn; ``divided``: how it says that its device is.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        stage: Stage,
        fabric: Fabric,
        costs: LinearCosts = INSTANT,
        num_slots: int = 256,
        max_batch_tokens: int = 2048,
        beside: tuple[WorkerId, ...] = (),
        cache_items: int = 1 << 30,
        timeout_s: float = 30.0,
    ) -> None:
        self.worker_id, self.stage, self.beside = worker_id, stage, beside
        self.num_slots, self.max_batch_tokens = num_slots, max_batch_tokens
        self._timeout_s = timeout_s
        self.store = Store(cache_items)
        if stage is Stage.PREFILL:
            fabric.stores[worker_id] = self.store
        self._fabric, self._costs = fabric, costs
        self.failures: defaultdict[str, list[Exception]] = defaultdict(list)
        self.permits: dict[str, asyncio.Semaphore] = {}
        self.dead = False
        self.running = self.num_pieces = 0
        self.calls: Counter[str] = Counter()
        self.encode_calls: list[int] = []
        self.demands: list[Demand] = []
        self.refused: set[str] = set()
        self.deadly: set[str] = set()
        self.encoded: Counter[str] = Counter()
        self.resent: Counter[str] = Counter()
        self.lost: set[str] = set()
        self.divided: Division | None = None

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
        text, keys = _text_and_keys(body)
        given = body.get("prompt")
        tokens = given if isinstance(given, list) else [10 + len(word) for word in text]
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        place = [
            {"offset": i * TOKENS_PER_ITEM, "length": TOKENS_PER_ITEM} for i in range(len(keys))
        ]
        features = {"mm_hashes": {"image": keys}, "mm_placeholders": {"image": place}}
        sampling = {name: body[name] for name in SAMPLING if name in body}
        return Prompt(
            [PLACEHOLDER] * TOKENS_PER_ITEM * len(keys) + tokens,
            {"max_tokens": limit, "prompt": " ".join(text), **sampling},
            features if keys else None,
            tuple(MediaItem(key, Modality.IMAGE, TOKENS_PER_ITEM) for key in keys),
            (PLACEHOLDER,) * len(keys),
            body,
        )

    async def encode(self, calls: Sequence[EncodeCall], demand: Demand = SHARED) -> Encoded:
        self._begin("encode")
        self.demands.append(demand)
        self.encode_calls.append(len(calls))
        keys = {call.media.key for call in calls}
        new = keys - self.store.keys.keys()
        await self._work("encode", self._costs.encode_s(len(new), TOKENS_PER_ITEM * len(new)))
        if keys & self.refused:
            raise EngineError("an item cannot be encoded", 400)
        self.dead |= bool(keys & self.deadly)
        self._check("encode")
        self.encoded.update(new)
        self.resent.update(keys - new)
        await self.store.push(sorted(new))
        for destination in sorted({each for call in calls for each in call.destinations}):
            wanted = [call.media.key for call in calls if destination in call.destinations]
            sent = [key for key in wanted if key not in self.lost]
            store = self._fabric.stores.get(destination)
            if sent and store is not None:  # one that is gone gets nothing
                await store.push(sent)
        self.lost -= keys
        _, evicted = self.store.news()
        return Encoded(evicted)

    async def prefill(self, prompt: Prompt, coming: Collection[int]) -> Prefilled:
        self._begin("prefill")
        keys = [item.key for item in prompt.items]
        clock = asyncio.get_running_loop().time
        begin_s = clock()
        there = [key for index, key in enumerate(keys) if index not in coming]
        if missing := (
            await self.store.missing(there, GRACE_S)
            or await self.store.missing(keys, self._timeout_s)
        ):
            self._check("prefill")
            raise EmbeddingMissingError(f"no embeddings of {missing}", 500, missing)
        wait_s = clock() - begin_s
        await self._work("prefill", self._costs.prefill_s(len(prompt.token_ids)))
        cache = KvCache(str(prompt.sampling["prompt"]), tuple(item.key for item in prompt.items))
        bundles, evicted = self.store.news()
        if prompt.max_new_tokens <= 1 and decides(prompt):
            answer = _deltas(cache, prompt)[0]
            return Prefilled({}, answer, wait_s, bundles, evicted)
        handle = next(self._fabric.handles)
        self._fabric.kv[handle] = cache
        return Prefilled({"handle": handle}, None, wait_s, bundles, evicted)

    async def decode(self, prompt: Prompt, handle: Mapping[str, Any]) -> AsyncIterator[Delta]:
        self._begin("decode")
        cache = self._pull(handle)
        deltas = _deltas(cache, prompt)
        if prompt.route is Route.OPENAI:
            deltas = _chunks(deltas, prompt) if prompt.stream else [_whole(deltas, prompt)]
        for delta in deltas:
            await self._work("decode", self._costs.step_s(self.running + 1))
            self._check("decode")
            self.num_pieces += 1
            yield delta

    async def _work(self, call: str, seconds: float) -> None:
        self.running += 1
        try:
            if call in self.permits:
                await self.permits[call].acquire()
            await asyncio.sleep(seconds)
        finally:
            self.running -= 1

    async def release(self, prompt: Prompt, handle: Mapping[str, Any]) -> None:
        self._begin("release")
        await self._work("release", 0.0)
        self._pull(handle)

    def _pull(self, handle: Mapping[str, Any]) -> KvCache:
        self._fabric.uses[handle["handle"]] += 1
        try:
            return self._fabric.kv.pop(handle["handle"])
        except KeyError:
            raise EngineError("a KV handle was used twice", 500) from None

    async def divide(self, demand: Demand) -> None:
        self._begin("divide")
        await self._work("divide", 0.0)
        self.demands.append(demand)

    async def division(self) -> Division | None:
        self._begin("division")
        return self.divided

    async def health(self) -> bool | None:
        return not self.dead

    async def metrics(self) -> str:
        return ""

    async def close(self) -> None:
        return None


def decides(prompt: Prompt) -> bool:
    """Whether prefill may end an answer: a grammar and the parsing of an answer are decode's."""
    return prompt.route is Route.TEXT and "structured_outputs" not in prompt.sampling


def _text_and_keys(body: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The words and the pictures of a request."""
    given, keys = body.get("prompt", ""), []
    text = given.split() if isinstance(given, str) else [str(token) for token in given]
    for message in body.get("messages", ()):
        parts = message.get("content") or ""
        for part in [{"type": "text", "text": parts}] if isinstance(parts, str) else parts:
            if part["type"] == "text":
                text += str(part["text"]).split()
            else:
                keys.append(part["uuid"])
    return text, keys


def _deltas(cache: KvCache, prompt: Prompt) -> list[Delta]:
    """The answer of one choice as text, a token for each word."""
    answer = words(cache.text, cache.keys, prompt.sampling.get("seed"))
    reason = "length" if prompt.max_new_tokens <= len(answer) else "stop"
    answer = answer[: prompt.max_new_tokens]
    return [
        Delta(
            word,
            (FIRST_TOKEN + number,),
            reason if number == len(answer) - 1 else None,
            logprobs=[logprob(word)] if prompt.body.get("logprobs") else None,
        )
        for number, word in enumerate(answer)
    ]


def logprob(word: str) -> dict[str, Any]:
    """An entry in OpenAI's chat form, with more alternatives than anybody asks for."""
    entry = {"token": word, "logprob": -0.5, "bytes": list(word.encode())}
    return {**entry, "top_logprobs": [{**entry, "logprob": -0.5 - number} for number in range(3)]}


# The OpenAI routes of decode, as vLLM answers them ------------------------------------------------


def _usage(prompt: Prompt, num_tokens: int) -> dict[str, Any]:
    num_prompt = len(prompt.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "completion_tokens_details": {"reasoning_tokens": 1} if _is_chat(prompt) else None,
    }


def _is_chat(prompt: Prompt) -> bool:
    return "messages" in prompt.body


def _call(prompt: Prompt, arguments: str) -> dict[str, Any]:
    """A call of the request's first tool. The answer is its arguments."""
    name = prompt.body["tools"][0]["function"]["name"]
    return {"id": "call-0", "type": "function", "function": {"name": name, "arguments": arguments}}


def _reason(delta: Delta, prompt: Prompt) -> str | None:
    called = delta.finish_reason == "stop" and prompt.body.get("tools")
    return "tool_calls" if called else delta.finish_reason


def _chunks(deltas: Sequence[Delta], prompt: Prompt) -> list[Delta]:
    """A role, a chunk for each token (the first of a call says nothing), and the usage.

    Each has the usage so far.
    """
    chunks: list[dict[str, Any]] = []
    if _is_chat(prompt):
        role = {"role": "assistant", "content": ""}
        chunks.append({"delta": role, "logprobs": None, "finish_reason": None})
    for number, delta in enumerate(deltas):
        chunk: dict[str, Any] = {"logprobs": None, "finish_reason": _reason(delta, prompt)}
        if not _is_chat(prompt):
            chunk["text"] = (_echo(prompt) if number == 0 else "") + delta.text
        elif not prompt.body.get("tools"):
            chunk["delta"] = {"content": delta.text}
        elif number == 0:
            chunk["delta"] = {}
        elif number == 1:
            call = _call(prompt, deltas[0].text + delta.text)
            chunk["delta"] = {"tool_calls": [{"index": 0, **call}]}
        else:
            piece = {"index": 0, "function": {"arguments": delta.text}}
            chunk["delta"] = {"tool_calls": [piece]}
        if not prompt.body.get("echo"):
            chunk["token_ids"] = list(delta.token_ids)
        chunks.append(chunk)
    made = [
        Delta(
            "",
            chunk.get("token_ids", ()),
            chunk["finish_reason"],
            choice={"index": 0, **chunk},
            usage=_usage(prompt, len(deltas) - len(chunks) + number),
        )
        for number, chunk in enumerate(chunks, 1)
    ]
    return [*made, Delta("", usage=_usage(prompt, len(deltas)))]


def _whole(deltas: Sequence[Delta], prompt: Prompt) -> Delta:
    """The whole choice and the usage."""
    text = "".join(delta.text for delta in deltas)
    token_ids = [token for delta in deltas for token in delta.token_ids]
    choice: dict[str, Any] = {"index": 0, "logprobs": None}
    choice |= {"finish_reason": _reason(deltas[-1], prompt), "stop_reason": None}
    if not _is_chat(prompt):
        choice["text"] = _echo(prompt) + text
    elif prompt.body.get("tools"):
        calls = [_call(prompt, text)] if len(deltas) > 1 else []
        choice["message"] = {"role": "assistant", "content": None, "tool_calls": calls}
    else:
        choice["message"] = {"role": "assistant", "content": text}
    choice["token_ids"] = None if prompt.body.get("echo") else token_ids
    return Delta(
        "",
        choice["token_ids"] or (),
        choice["finish_reason"],
        choice=choice,
        usage=_usage(prompt, len(deltas)),
    )


def _echo(prompt: Prompt) -> str:
    return str(prompt.sampling["prompt"]) if prompt.body.get("echo") else ""
