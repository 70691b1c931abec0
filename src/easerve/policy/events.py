"""What the core is told (events, past tense) and what it asks for (actions, imperative).

A request is answered by ``num_choices`` legs; a leg is one prefill and the decode that pulls its
KV cache. A KV handle is used once, so a leg that is tried again starts at prefill with a new
``attempt``; an answer that carries an old attempt is ignored.
"""

from dataclasses import dataclass
from typing import TypeAlias, get_args

from easerve.policy.knobs import Knobs
from easerve.policy.offload import Placement
from easerve.policy.partition import SHARED, Demand
from easerve.types import BatchId, MediaItem, Modality, Reason, RequestId, Shape, Stage, WorkerId

DEFAULT_SLOTS, DEFAULT_BATCH_TOKENS = 256, 2048  # vLLM's, on a CPU

# Events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """An engine is ready.

    ``num_slots``: requests that it runs at once (vLLM's max_num_seqs). ``max_batch_tokens``: what
    one call to an encoder may hold (vLLM's max_num_batched_tokens). ``beside``: the encoders whose
    devices a local prefill engine shares.
    """

    worker_id: WorkerId
    stage: Stage
    num_slots: int = DEFAULT_SLOTS
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS
    beside: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """An engine ended or no longer answers."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Evicted:
    """An engine keeps the embeddings of these items no longer."""

    worker_id: WorkerId
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KnobsChanged:
    """All knobs at once; in force from this step on."""

    knobs: Knobs


@dataclass(frozen=True, slots=True)
class Draining:
    """The server is about to end: no batch waits for company any more."""


@dataclass(frozen=True, slots=True)
class ClientCancelled:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """A request was read, and nothing done for it yet; admission decides.

    ``request_id`` is never used again, so that a late answer cannot meet another request.
    ``can_resume``: a decode that dies mid-stream can go on from the tokens already sent.
    """

    request_id: RequestId
    num_bytes: int
    modalities: tuple[Modality, ...] = ()
    num_choices: int = 1
    can_resume: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """The media are decoded and checked, the prompt is tokens."""

    request_id: RequestId
    shape: Shape


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """Not ``retryable``: the request or its media are at fault."""

    request_id: RequestId
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class EncodeFinished:
    batch_id: BatchId


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    batch_id: BatchId
    retryable: bool


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """``final``: the first token ended the answer, there is nothing left to decode.

    ``wait_s``: of the time since it was started, how long the engine waited for embeddings.
    """

    request_id: RequestId
    leg: int
    attempt: int
    final: bool = False
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    request_id: RequestId
    leg: int
    attempt: int
    retryable: bool


@dataclass(frozen=True, slots=True)
class EmbeddingMissing:
    """Prefill does not have the embeddings of these items, nor will it wait any longer."""

    request_id: RequestId
    leg: int
    attempt: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The client has been sent something of this leg."""

    request_id: RequestId
    leg: int
    attempt: int


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """``decode_s``: how long the engine took, without waiting for the client; ``tpot_s``: a token.

    0 where they were not measured.
    """

    request_id: RequestId
    leg: int
    attempt: int
    decode_s: float = 0.0
    tpot_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    request_id: RequestId
    leg: int
    attempt: int
    retryable: bool


# The union's order is the order of the events of one instant: what engines have done counts even if
# they are lost in the same instant; then the pool; then work that ends (it frees capacity) and work
# that begins; a cancellation last, for its request may have been received in the same instant.
Event: TypeAlias = (
    FirstToken
    | DecodeFinished
    | EncodeFinished
    | Evicted
    | WorkerJoined
    | WorkerLost
    | KnobsChanged
    | Draining
    | DecodeFailed
    | PrefillFinished
    | PrefillFailed
    | EmbeddingMissing
    | EncodeFailed
    | Prepared
    | PrepareFailed
    | RequestReceived
    | ClientCancelled
)
_RANK = {kind: rank for rank, kind in enumerate(get_args(Event))}


def sort_key(event: Event) -> tuple[int, str | int, int, int, str]:
    """The total order of simultaneous events: kind, id, leg, attempt, then whatever differs."""
    match event:
        case WorkerJoined() | WorkerLost() | Evicted():
            name: str | int = event.worker_id
        case EncodeFinished() | EncodeFailed():
            name = event.batch_id
        case KnobsChanged() | Draining():
            name = ""
        case _:
            name = event.request_id
    leg, attempt = getattr(event, "leg", 0), getattr(event, "attempt", 0)
    return _RANK[type(event)], name, leg, attempt, repr(event)


# Actions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Decode and check the media, render the prompt; answered by Prepared or PrepareFailed."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that wants an embedding for its item ``index``, at a prefill worker."""

    request_id: RequestId
    index: int
    destination: WorkerId


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """One media item of a batch, encoded once for all who wait for it now."""

    item: MediaItem
    waiters: tuple[Waiter, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a batch was closed, and what was known then.

    ``wait_s``: of the item that waited longest. ``held_s``: how long downstream credits held the
    batch back, by ``held_by``. ``num_left``: items still in the queue. ``rate_per_s``, ``cv``: the
    estimated arrival rate of media requests and the coefficient of variation of their gaps.
    """

    reason: str
    wait_s: float
    held_s: float
    held_by: str
    num_left: int
    rate_per_s: float
    cv: float


@dataclass(frozen=True, slots=True)
class StartEncode:
    """One call to an encoder; each embedding is pushed to the destinations of its waiters.

    ``forward``: else the encoder is believed to have them all, and only sends them. ``demand``: of
    the device that the encoder shares with a local prefill engine.
    """

    batch_id: BatchId
    worker_id: WorkerId
    items: tuple[EncodeItem, ...]
    decision: Decision
    forward: bool = True
    demand: Demand = SHARED


@dataclass(frozen=True, slots=True)
class Divide:
    """The encoder's part of its device between batches, from now on."""

    worker_id: WorkerId
    demand: Demand


@dataclass(frozen=True, slots=True)
class Retuned:
    """A knob has been changed by the core itself, and why; in force from this step on."""

    knob: str
    before: float
    after: float
    reason: str


@dataclass(frozen=True, slots=True)
class CancelEncode:
    """Nobody waits for anything of this batch any more."""

    batch_id: BatchId


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """``placement``: why on this side; ``reason``: why this worker of it.

    ``coming``: indices of the items whose embeddings are on their way to it; the others should be
    there. ``num_held``: items whose
    embeddings it had already. A leg that resumes prefills the tokens already sent, too.
    """

    request_id: RequestId
    leg: int
    attempt: int
    worker_id: WorkerId
    reason: str
    placement: Placement
    coming: tuple[int, ...] = ()
    num_held: int = 0
    resume: bool = False


@dataclass(frozen=True, slots=True)
class StartDecode:
    request_id: RequestId
    leg: int
    attempt: int
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop what runs for the request, but for encode batches: see CancelEncode."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Reject:
    """Refused before any work was done."""

    request_id: RequestId
    reason: Reason
    retry_after_s: int


@dataclass(frozen=True, slots=True)
class Fail:
    request_id: RequestId
    reason: Reason


@dataclass(frozen=True, slots=True)
class Complete:
    """Every leg has its answer."""

    request_id: RequestId


RequestAction: TypeAlias = Prepare | StartPrefill | StartDecode | Cancel | Reject | Fail | Complete
Action: TypeAlias = StartEncode | CancelEncode | Divide | Retuned | RequestAction
