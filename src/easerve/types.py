"""The values that every layer speaks of. Frozen, standard library only."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
BatchId = NewType("BatchId", int)

NS_PER_S = 1_000_000_000


class Stage(StrEnum):
    """The stages that engines run, in pipeline order."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Side(StrEnum):
    """Where a prefill runs."""

    LOCAL = "local"
    """Beside an encoder, on its device."""
    REMOTE = "remote"
    """On the pool of prefill engines."""


class Modality(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class Reason(StrEnum):
    """Why a request ended without its answer."""

    OVERLOADED = "overloaded"
    """The server holds as many requests as it may."""
    NO_WORKER = "no_worker"
    """No engine of a stage that the request needs is running."""
    PREPARE_FAILED = "prepare_failed"
    """The request or its media cannot be used; the client's fault."""
    ENCODE_FAILED = "encode_failed"
    PREFILL_FAILED = "prefill_failed"
    DECODE_FAILED = "decode_failed"
    WORKER_LOST = "worker_lost"
    """The engine that held the request ended, and it was retried as often as it may be."""
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One picture, video or sound of a request.

    ``key`` identifies the embedding (a hash of the decoded content and of every option that
    changes the embedding); ``num_tokens`` is the number of embedding vectors it becomes.
    """

    key: str
    modality: Modality
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Picture:
    """``width`` and ``height`` in pixels, as a client sends it."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Video:
    """``frames`` pictures of ``width`` by ``height`` pixels."""

    width: int
    height: int
    frames: int


@dataclass(frozen=True, slots=True)
class Sound:
    seconds: float


Content = Picture | Video | Sound
"""What a media item is before a model makes tokens of it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a prepared request asks of the stages.

    ``num_prompt_tokens`` counts the expanded prompt, media placeholders included.
    """

    num_prompt_tokens: int
    max_new_tokens: int
    items: tuple[MediaItem, ...] = ()
