"""What the server asks of a stage engine.

One engine plays one stage; the server calls only that stage's method, ``render`` (on an encoder
for prompts with media, on a prefill engine for text) and ``health``.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from easerve.policy.partition import SHARED, Demand
from easerve.types import MediaItem, Stage, WorkerId


class Route(StrEnum):
    """Who turns decode's tokens into the chunks of an answer.

    TEXT: decode sends text, the router wraps it. OPENAI: decode's own OpenAI route does, which
    knows how to parse tool calls and reasoning.
    """

    TEXT = "text"
    OPENAI = "openai"


class EngineError(Exception):
    """An engine did not do what it was asked.

    ``status`` is its HTTP status, or None when it could not be reached or broke off. A 4xx is the
    request's fault; anything else may go better on another engine, or on this one later.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def retryable(self) -> bool:
        return self.status is None or self.status >= 500


class EmbeddingMissingError(EngineError):
    """Prefill does not have the embeddings of the items with these ``keys``."""

    def __init__(self, message: str, status: int | None, keys: tuple[str, ...]) -> None:
        super().__init__(message, status)
        self.keys = keys


@dataclass(frozen=True, slots=True)
class Media:
    """One decoded, checked media item.

    ``key``: hash of the decoded content. ``url``: a data URL with a canonical encoding of it.
    """

    key: str
    item_type: str
    url: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered request: tokens in, and where the media sit in them.

    ``token_ids`` is the expanded prompt. ``features`` are vLLM's hashes and placeholders (None for
    text), ``items`` the same in prompt order, ``placeholders`` the token that stands for each.
    ``sampling`` are vLLM's sampling parameters. ``body`` is the request as it was rendered.
    ``route``: who makes the answer's chunks; ``stream``: whether they are wanted one by one.
    """

    token_ids: Sequence[int]
    sampling: Mapping[str, Any]
    features: Mapping[str, Any] | None = None
    items: tuple[MediaItem, ...] = ()
    placeholders: tuple[int, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict)
    route: Route = Route.TEXT
    stream: bool = True

    @property
    def max_new_tokens(self) -> int:
        return int(self.sampling["max_tokens"])

    def for_leg(self, leg: int) -> "Prompt":
        """The prompt of one choice: of several with a seed, each has its own (as in vLLM)."""
        seed = self.sampling.get("seed")
        if leg == 0 or seed is None:
            return self
        return replace(self, sampling={**self.sampling, "seed": seed + leg})


@dataclass(frozen=True, slots=True)
class EncodeCall:
    """One item of an encoder call: its media, its placeholder token.

    ``destinations``: the prefill engines that its embedding is pushed to.
    """

    media: Media
    placeholder: int
    destinations: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """``evicted``: keys of items that the encoder keeps no longer, since it last said so."""

    evicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Driven:
    """What divides a device of ``total`` units in one engine, and why that.

    ``parts``: units that a batch can get beside prefill, rising; none: not per batch.
    """

    driver: str
    why: str
    total: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """How an encoder and its local prefill engine divide their device; None: not started yet.

    ``counts``: of both since they started, as ``engines.partition.cell.State`` names them.
    """

    encode: Driven | None
    prefill: Driven | None
    counts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Embeddings that one encoder step pushed to one prefill engine.

    ``usable_s``: from the push to when the engine could use them.
    """

    num_items: int
    num_bytes: int
    usable_s: float


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. ``finish_reason`` is set on the last one only.

    ``logprobs``: OpenAI's chat form, one entry per token. On Route.OPENAI a piece is ``choice``, as
    OpenAI's API has it (a chunk's, or the whole one), and ``usage`` counts up to it.
    """

    text: str
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[Mapping[str, Any]] | None = None
    choice: Mapping[str, Any] | None = None
    usage: Mapping[str, Any] | None = None

    def num_tokens(self, before: int) -> int:
        """Tokens of the answer up to this piece, as its engine counts them or as they came."""
        counted = before + len(self.token_ids)
        return counted if self.usage is None else int(self.usage["completion_tokens"])


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What prefill made: the single-use handle of the KV cache, or the answer.

    ``answer``: the first token, when it ended the answer and there is nothing to decode.
    ``wait_s``: how long the engine waited for the request's embeddings, where it says so.
    ``bundles``: that came to the engine since it last said so, ``evicted``: keys of items that it
    keeps no longer since then.
    """

    handle: Mapping[str, Any] = field(default_factory=dict)
    answer: Delta | None = None
    wait_s: float | None = None
    bundles: tuple[Bundle, ...] = ()
    evicted: tuple[str, ...] = ()


class Engine(Protocol):
    """``num_slots``: requests it runs at once. ``max_batch_tokens``: of one call to an encoder.

    ``beside``: the encoders whose devices a local prefill engine shares; of any other none.
    """

    worker_id: WorkerId
    stage: Stage
    num_slots: int
    max_batch_tokens: int
    beside: tuple[WorkerId, ...]

    async def render(self, body: Mapping[str, Any]) -> Prompt:
        """Tokens of an OpenAI request (``messages`` or a ``prompt``); runs no model."""
        ...

    async def encode(self, calls: Sequence[EncodeCall], demand: Demand = SHARED) -> Encoded:
        """One call, one encoder forward; pushes the embeddings, a bundle per destination.

        An item that the encoder still has is pushed without a forward. ``demand``: of the device
        that it shares with a local prefill engine, which hears of it when the call arrives.
        """
        ...

    async def divide(self, demand: Demand) -> None:
        """The encoder's part of that device between its calls, from now on."""
        ...

    async def division(self) -> Division | None:
        """How that device is divided; None: it is not."""
        ...

    async def prefill(self, prompt: Prompt, coming: Collection[int]) -> Prefilled:
        """Prefill and hold the KV cache for one decode.

        ``coming``: indices of the items whose embeddings are on their way, and waited for. The
        others should be there: one that is not is an EmbeddingMissingError soon.
        """
        ...

    def decode(self, prompt: Prompt, handle: Mapping[str, Any]) -> AsyncIterator[Delta]:
        """Pull the KV cache and generate. The first piece repeats prefill's token."""
        ...

    async def release(self, prompt: Prompt, handle: Mapping[str, Any]) -> None:
        """Pull a KV cache that nobody decodes, so that prefill frees it."""
        ...

    async def health(self) -> bool | None:
        """True: it works. False: it is gone for good. None: it did not say."""
        ...

    async def metrics(self) -> str:
        """The engine's own metrics in Prometheus text form."""
        ...

    async def close(self) -> None:
        """Close the connections to the engine; the engine itself goes on."""
        ...
