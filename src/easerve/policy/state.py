"""The records the core keeps of an open request and of its legs."""

from dataclasses import dataclass, field

from easerve.policy.lifecycle import LEG, LegState, RequestState
from easerve.types import NS_PER_S, MediaItem, RequestId, Shape, WorkerId

NOT_PREPARED = Shape(num_prompt_tokens=0, max_new_tokens=0)


@dataclass(slots=True)
class Leg:
    """One prefill and the decode that pulls its KV cache.

    ``worker_id`` runs it now; ``started``: the client has been sent something of it.
    """

    index: int
    state: LegState
    attempt: int = 0
    worker_id: WorkerId | None = None
    started: bool = False
    beside: int = 0
    """Legs that its decode worker ran when it began, itself counted."""

    def move(self, cause: str) -> None:
        self.state = LEG.next(self.state, cause)
        if self.state is LegState.PREFILL_QUEUED:
            self.attempt += 1


@dataclass(slots=True, eq=False)
class Request:
    request_id: RequestId
    state: RequestState
    num_bytes: int
    num_choices: int
    can_resume: bool
    received_ns: int
    deadline_ns: int
    retries_left: int
    num_media: int
    shape: Shape = NOT_PREPARED
    pending: set[int] = field(default_factory=set)
    """Indices of the items that are queued for an encoder or being encoded."""
    passed: bool = False
    """Past the gate: something of it was sent to an encoder or to prefill."""
    destination: WorkerId | None = None
    """The prefill worker that its embeddings were sent to."""
    legs: list[Leg] = field(default_factory=list)
    avoid: set[WorkerId] = field(default_factory=set)
    """Workers that failed it."""

    def due_ns(self, ttft_slo_s: float | None) -> int:
        """When its first token is due; without a promise, when it times out."""
        if ttft_slo_s is None:
            return self.deadline_ns
        return self.received_ns + int(ttft_slo_s * NS_PER_S)

    @property
    def items(self) -> tuple[MediaItem, ...]:
        return self.shape.items
