"""A core, and short words for what a driver tells it. Worker ``e0`` encodes, ``p0`` prefills …

``l0`` prefills beside ``e0``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from easerve.config import Policy
from easerve.costs.linear import LinearCosts
from easerve.policy import events as ev
from easerve.policy.admission import Admission
from easerve.policy.core import Core, Limits
from easerve.policy.estimates import Estimates
from easerve.policy.knobs import Knobs
from easerve.policy.lifecycle import RequestState
from easerve.policy.offload import Placement
from easerve.policy.partition import Devices, Surface
from easerve.policy.placing import LEAST
from easerve.policy.state import Request
from easerve.policy.supply import HELD
from easerve.serve.admin import knobs_of
from easerve.types import (
    NS_PER_S,
    BatchId,
    MediaItem,
    Modality,
    RequestId,
    Shape,
    Side,
    Stage,
    WorkerId,
)

STAGES = {"e": Stage.ENCODE, "p": Stage.PREFILL, "l": Stage.PREFILL, "d": Stage.DECODE}
LIMITS = Limits(max_retries=2, request_timeout_ns=1000, worker_wait_ns=100)
ADMISSION = Admission(max_requests=100, max_bytes=1000)
NUM_PROMPT_TOKENS, MAX_NEW_TOKENS, NUM_ITEM_TOKENS = 100, 20, 30

DEFAULTS = knobs_of(Policy())
NONE = replace(DEFAULTS, when="none")
PAIRS = replace(DEFAULTS, when="fixed", timeout_s=50e-9, max_batch_items=2, run_ahead=0)
"""Two items, or one that has waited for 50 ns."""

FOREVER = Limits()
MS = NS_PER_S // 1000
GREEDY = replace(DEFAULTS, when="greedy", max_batch_items=4, spread=False, run_ahead=0)
SLOW = LinearCosts(  # a call of a picture takes 330 ms, a prompt 100 ms
    encode_base_s=0.3,
    encode_token_s=0.001,
    prefill_base_s=0.0,
    prefill_token_s=0.001,
    decode_token_s=0.02,
)

SURFACE = Surface(NUM_ITEM_TOKENS, ((1, ((8, 0.02), (16, 0.01))), (2, ((8, 0.05), (16, 0.03)))))
"""One picture is encoded in time on 8 units, two are not on any."""

R, S, T = map(RequestId, "rst")
E0, E1, E2 = map(WorkerId, ("e0", "e1", "e2"))
P0, P1 = map(WorkerId, ("p0", "p1"))
L0, L1 = map(WorkerId, ("l0", "l1"))
D0, D1 = map(WorkerId, ("d0", "d1"))
B1, B2, B3, B4 = map(BatchId, range(1, 5))


def joined(worker_id: WorkerId, **limits: int) -> ev.WorkerJoined:
    beside = (WorkerId(f"e{worker_id[1:]}"),) if worker_id.startswith("l") else ()
    return ev.WorkerJoined(worker_id, STAGES[worker_id[0]], beside=beside, **limits)


def picture(key: str, num_tokens: int = NUM_ITEM_TOKENS) -> MediaItem:
    return MediaItem(key, Modality.IMAGE, num_tokens)


def item(request_id: RequestId, index: int) -> MediaItem:
    return picture(f"{request_id}.{index}")


def shape_of(*items: MediaItem) -> Shape:
    return Shape(NUM_PROMPT_TOKENS, MAX_NEW_TOKENS, items)


def shape(request_id: RequestId, num_items: int) -> Shape:
    return shape_of(*(item(request_id, index) for index in range(num_items)))


def request(
    name: str, *items: MediaItem | str, received_ns: int = 0, num_choices: int = 1
) -> Request:
    """The record of a request that wants these items (or keys)."""
    made = Request(
        RequestId(name),
        RequestState.PREPARING,
        num_bytes=1,
        num_choices=num_choices,
        can_resume=False,
        received_ns=received_ns,
        deadline_ns=received_ns + LIMITS.request_timeout_ns,
        retries_left=LIMITS.max_retries,
        num_media=len(items),
    )
    made.shape = shape_of(*map(as_item, items))
    return made


def as_item(item: MediaItem | str) -> MediaItem:
    return picture(item) if isinstance(item, str) else item


def finished(number: int) -> ev.EncodeFinished:
    return ev.EncodeFinished(BatchId(number))


def for_good(number: int) -> ev.EncodeFailed:
    return ev.EncodeFailed(BatchId(number), retryable=False)


def encode_item(request_id: RequestId, index: int, destination: WorkerId = P0) -> ev.EncodeItem:
    return ev.EncodeItem(item(request_id, index), (ev.Waiter(request_id, index, destination),))


@dataclass(frozen=True)
class Because:
    """Equal to every decision that was made for this reason."""

    reason: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ev.Decision) and other.reason == self.reason


@dataclass(frozen=True)
class On:
    """Equal to every placement on this side."""

    side: Side

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and other.side is self.side


def start_encode(
    batch_id: int, worker_id: WorkerId, *items: ev.EncodeItem, reason: str = "pass-through"
) -> ev.StartEncode:
    """To compare with; of its decision only the reason counts."""
    because: Any = Because(reason)
    return ev.StartEncode(BatchId(batch_id), worker_id, items, because)


def start_send(batch_id: int, worker_id: WorkerId, *items: ev.EncodeItem) -> ev.StartEncode:
    """As ``start_encode``; the encoder has the items already."""
    return replace(start_encode(batch_id, worker_id, *items, reason=HELD), forward=False)


class Some:
    """Equal to everything that is not empty."""

    def __eq__(self, other: object) -> bool:
        return bool(other)

    __hash__ = None  # type: ignore[assignment]


def start_prefill(
    request_id: RequestId = R,
    worker_id: WorkerId = P0,
    leg: int = 0,
    attempt: int = 0,
    reason: str = LEAST,
    coming: bool = False,
    **more: Any,
) -> ev.StartPrefill:
    """To compare with; of its placement only the side counts, and whether anything is coming."""
    side: Any = On(Side.LOCAL if worker_id.startswith("l") else Side.REMOTE)
    indices: Any = Some() if coming else ()
    return ev.StartPrefill(request_id, leg, attempt, worker_id, reason, side, indices, **more)


def batches(actions: Sequence[ev.Action]) -> list[ev.StartEncode]:
    return [action for action in actions if isinstance(action, ev.StartEncode)]


def prefills(actions: Sequence[ev.Action]) -> list[ev.StartPrefill]:
    return [action for action in actions if isinstance(action, ev.StartPrefill)]


def keys_of(batch: ev.StartEncode) -> str:
    """The keys of a batch, one word each."""
    return " ".join(entry.item.key for entry in batch.items)


def sent(actions: Sequence[ev.Action]) -> list[tuple[WorkerId, str, str]]:
    """Encoder, keys and reason of every batch that is started."""
    return [(b.worker_id, keys_of(b), b.decision.reason) for b in batches(actions)]


class Scenario:
    """One engine of each stage unless told otherwise; time stands still but for ``wait``."""

    def __init__(
        self,
        *workers: WorkerId | ev.WorkerJoined,
        knobs: Knobs = NONE,
        admission: Admission = ADMISSION,
        limits: Limits = LIMITS,
        estimates: Estimates | None = None,
        devices: Devices | None = None,
    ) -> None:
        self.core = Core(knobs, admission, estimates or LinearCosts(), limits, devices)
        self.now_ns = 0
        engines = workers or (E0, P0, D0)
        self.tell(
            *(each if isinstance(each, ev.WorkerJoined) else joined(each) for each in engines)
        )

    def tell(self, *events: ev.Event) -> list[ev.Action]:
        return self.core.step(events, self.now_ns)

    @property
    def deadline_ns(self) -> int:
        deadline_ns = self.core.next_deadline()
        assert deadline_ns is not None
        return deadline_ns

    def wait(self, time_ns: int) -> list[ev.Action]:
        self.now_ns += time_ns
        return self.tell()

    def tune(self, **changes: Any) -> list[ev.Action]:
        """Change some of the knobs."""
        return self.tell(ev.KnobsChanged(replace(self.core.knobs, **changes)))

    def receive(
        self,
        request_id: RequestId = R,
        num_items: int = 0,
        num_choices: int = 1,
        can_resume: bool = False,
        num_bytes: int = 1,
    ) -> list[ev.Action]:
        modalities = (Modality.IMAGE,) * num_items
        return self.tell(
            ev.RequestReceived(request_id, num_bytes, modalities, num_choices, can_resume)
        )

    def prepare(self, request_id: RequestId = R, num_items: int = 0) -> list[ev.Action]:
        return self.tell(ev.Prepared(request_id, shape(request_id, num_items)))

    def start(
        self,
        request_id: RequestId = R,
        num_items: int = 0,
        num_choices: int = 1,
        can_resume: bool = False,
    ) -> list[ev.Action]:
        """Receive and prepare; the actions of the second."""
        self.receive(request_id, num_items, num_choices, can_resume)
        return self.prepare(request_id, num_items)

    def ask(
        self, name: str, *items: MediaItem | str, num_choices: int = 1
    ) -> list[tuple[WorkerId, str, str]]:
        """Receive and prepare a request for these items (or keys); the batches that it starts."""
        request_id = RequestId(name)
        self.receive(request_id, len(items), num_choices)
        return sent(self.tell(ev.Prepared(request_id, shape_of(*map(as_item, items)))))

    def start_decode(
        self, num_items: int = 0, num_choices: int = 1, can_resume: bool = False
    ) -> list[ev.Action]:
        """Bring ``r`` to where all its legs decode; the actions of the last step."""
        self.start(R, num_items, num_choices, can_resume)
        self.tell(*(ev.EncodeFinished(BatchId(index + 1)) for index in range(num_items)))
        return self.tell(*(ev.PrefillFinished(R, leg, 0) for leg in range(num_choices)))

    def backlog(self) -> dict[WorkerId, int]:
        return {worker.worker_id: worker.backlog_tokens for worker in self.core.pool}


def slow_scenario(*workers: WorkerId | ev.WorkerJoined, **knobs: Any) -> Scenario:
    """Slow engines, a rule that never waits unless ``knobs`` says so, and no deadline near."""
    return Scenario(*workers, knobs=replace(GREEDY, **knobs), limits=FOREVER, estimates=SLOW)
