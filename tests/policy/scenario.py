"""A core, and short words for what a driver tells it. Worker ``e0`` encodes, ``p0`` prefills …"""

from collections.abc import Sequence

from easerve.costs.linear import LinearCosts
from easerve.policy import events as ev
from easerve.policy.admission import Admission
from easerve.policy.batching import BatchingRule, Close, NoBatching, QueuedItem, Wait
from easerve.policy.core import Core, Limits
from easerve.types import BatchId, MediaItem, Modality, RequestId, Shape, Stage, WorkerId

STAGES = {"e": Stage.ENCODE, "p": Stage.PREFILL, "d": Stage.DECODE}
LIMITS = Limits(max_retries=2, request_timeout_ns=1000, worker_wait_ns=100)
ADMISSION = Admission(max_requests=100, max_bytes=1000)
NUM_PROMPT_TOKENS, MAX_NEW_TOKENS, NUM_ITEM_TOKENS = 100, 20, 30

R, S = RequestId("r"), RequestId("s")
E0, E1 = WorkerId("e0"), WorkerId("e1")
P0, P1 = WorkerId("p0"), WorkerId("p1")
D0, D1 = WorkerId("d0"), WorkerId("d1")
B1, B2, B3, B4 = map(BatchId, range(1, 5))


class Pairs:
    """A waiting rule: two items for an idle encoder, or one that has waited for 50 ns."""

    name = "pairs"
    needs_idle = True
    patience_ns = 50

    def decide(self, queue: Sequence[QueuedItem], now_ns: int) -> Close | Wait:
        since = [queued.since_ns for queued in queue]
        assert since == sorted(since), "the queue is in order of arrival"
        if len(queue) >= 2:
            return Close(2, "full")
        until_ns = since[0] + self.patience_ns
        return Close(1, "timeout") if until_ns <= now_ns else Wait(until_ns)


def joined(worker_id: WorkerId) -> ev.WorkerJoined:
    return ev.WorkerJoined(worker_id, STAGES[worker_id[0]])


def item(request_id: RequestId, index: int) -> MediaItem:
    return MediaItem(f"{request_id}.{index}", Modality.IMAGE, NUM_ITEM_TOKENS)


def shape(request_id: RequestId, num_items: int) -> Shape:
    items = tuple(item(request_id, index) for index in range(num_items))
    return Shape(NUM_PROMPT_TOKENS, MAX_NEW_TOKENS, items)


def encode_item(request_id: RequestId, index: int, destination: WorkerId = P0) -> ev.EncodeItem:
    return ev.EncodeItem(request_id, index, item(request_id, index), destination)


class Scenario:
    """One engine of each stage unless told otherwise; time stands still but for ``wait``."""

    def __init__(
        self,
        *workers: WorkerId,
        batching: BatchingRule | None = None,
        admission: Admission = ADMISSION,
        limits: Limits = LIMITS,
    ) -> None:
        self.core = Core(batching or NoBatching(), admission, LinearCosts(), limits)
        self.now_ns = 0
        self.tell(*map(joined, workers or (E0, P0, D0)))

    def tell(self, *events: ev.Event) -> list[ev.Action]:
        return self.core.step(events, self.now_ns)

    def wait(self, time_ns: int) -> list[ev.Action]:
        self.now_ns += time_ns
        return self.tell()

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

    def start_decode(
        self, num_items: int = 0, num_choices: int = 1, can_resume: bool = False
    ) -> list[ev.Action]:
        """Bring ``r`` to where all its legs decode; the actions of the last step."""
        self.start(R, num_items, num_choices, can_resume)
        self.tell(*(ev.EncodeFinished(BatchId(index + 1)) for index in range(num_items)))
        return self.tell(*(ev.PrefillFinished(R, leg, 0) for leg in range(num_choices)))

    def backlog(self) -> dict[WorkerId, int]:
        return {worker.worker_id: worker.backlog_tokens for worker in self.core.pool}
