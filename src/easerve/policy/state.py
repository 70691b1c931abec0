"""The records the core keeps of an open request and of its legs."""

from dataclasses import dataclass, field

from easerve.policy.lifecycle import LEG, LegState, RequestState
from easerve.policy.offload import Placement
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
    since_ns: int = 0
    """When it was given to its worker."""
    beside: int = 0
    """Legs that its decode worker ran when it began, itself counted."""
    num_missed: int = 0
    """Of its request, when its prefill was started."""

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
    """Indices of the items that hold its prefill back: not on the way to its destination yet."""
    sent: set[int] = field(default_factory=set)
    """Indices of the items that were sent to a destination for it."""
    passed: bool = False
    """Past the gate: something of it was sent to an encoder or to prefill."""
    destination: WorkerId | None = None
    """The prefill worker that its embeddings are sent to."""
    placement: Placement | None = None
    """Why that one is on the side that it is on, and ``chosen`` why it is that one."""
    chosen: str = ""
    num_missed: int = 0
    """How often embeddings were not where they should have been."""
    legs: list[Leg] = field(default_factory=list)
    avoid: set[WorkerId] = field(default_factory=set)
    """Workers that failed it."""

    def due_ns(self, ttft_slo_s: float | None) -> int:
        """When its first token is due; without a promise, when it times out."""
        if ttft_slo_s is None:
            return self.deadline_ns
        return self.received_ns + int(ttft_slo_s * NS_PER_S)

    @property
    def needs_prefill(self) -> bool:
        """Whether a leg of it is not prefilled, nor being prefilled."""
        waiting = LegState.PREFILL_QUEUED
        return not self.legs or any(leg.state is waiting for leg in self.legs)

    @property
    def items(self) -> tuple[MediaItem, ...]:
        return self.shape.items
