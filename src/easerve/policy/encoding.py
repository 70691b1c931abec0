"""The pooled encode queue of all encoders, and the batches under way.

An item is known by its key: it is queued or being encoded once, however many requests wait for it.
What is under way goes to the destinations of those who waited when its batch was started; whoever
comes later, or wants it elsewhere, waits until it is there and has it sent on.

Items that one forward can take together are of one ``Kind``; a queue for each kind is in order of
``Knobs.order``. Of several batches that could go, the one with the first item goes, so that an odd
item waits for those before it only. Items of a batch that failed are suspects: they are a kind of
their own, smaller with each failure, until the one at fault is alone.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple, TypeAlias

from easerve.policy.knobs import Knobs, Order
from easerve.policy.state import Request
from easerve.types import BatchId, MediaItem, Modality, WorkerId

Admits: TypeAlias = Callable[[Request], bool]


class Kind(NamedTuple):
    """What shares a forward. ``num_tokens``: 0 where sizes may differ; ``suspects``: 0 for none."""

    modality: Modality
    num_tokens: int
    suspects: int


@dataclass(slots=True, eq=False)
class Entry:
    """An item that is queued or being encoded, for the requests (and their items) that wait.

    ``destinations``: the prefill engines that it is on its way to.
    """

    item: MediaItem
    number: int
    since_ns: int
    suspects: int = 0
    kind: Kind = field(init=False, repr=False)
    """Of the queue it is in."""
    waiters: list[tuple[Request, int]] = field(default_factory=list)
    batch_id: BatchId | None = None
    destinations: set[WorkerId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Batch:
    """One call to an encoder; without a ``forward`` it only sends what the encoder has."""

    worker_id: WorkerId
    entries: tuple[Entry, ...]
    forward: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(entry.item.num_tokens for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Candidate:
    """The first items of a kind that fit into one call, and how many more would.

    ``num_queued``: of that kind, in all.
    """

    entries: Sequence[Entry]
    room: int
    num_queued: int

    @property
    def suspect(self) -> bool:
        return self.entries[0].suspects > 0

    @property
    def full(self) -> bool:
        """Nothing fits any more, or is to join: suspects get no company."""
        return self.room <= 0 or self.suspect

    @property
    def may_run_ahead(self) -> bool:
        """What an engine may die of is not put in front of what it is doing."""
        return self.full and not self.suspect


class Encoding:
    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self._entries: dict[str, Entry] = {}
        self._queues: dict[Kind, list[Entry]] = {}
        self._batches: dict[BatchId, Batch] = {}
        self._last_batch = self._last_number = self._last_suspects = 0

    # The queue --------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        return sum(map(len, self._queues.values()))

    def want(self, request: Request, index: int, now_ns: int) -> bool:
        """An item that the request has to get: queued, or joined to what is queued or under way.

        Whether it is new. Unless it is under way to the destination of the request, its prefill is
        held back.
        """
        item = request.items[index]
        entry = self._entries.get(item.key)
        new = entry is None
        if entry is None:
            entry = self._new(item, now_ns)
        elif entry.batch_id is None:
            self._dequeue(entry)
        if (request, index) not in entry.waiters:
            entry.waiters.append((request, index))
        if request.destination in entry.destinations:
            request.pending.discard(index)
        else:
            request.pending.add(index)
        if entry.batch_id is None:
            self._enqueue(entry)
        return new

    def _new(self, item: MediaItem, now_ns: int) -> Entry:
        self._last_number += 1
        entry = self._entries[item.key] = Entry(item, self._last_number, now_ns)
        return entry

    def has(self, key: str) -> bool:
        """Whether an item is queued or under way."""
        return key in self._entries

    def under_way(self, key: str) -> Entry | None:
        """An item that an encoder works on."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.batch_id is not None else None

    def goes_to(self, worker_id: WorkerId, key: str) -> bool:
        """Whether an item is under way to a prefill worker."""
        entry = self.under_way(key)
        return entry is not None and worker_id in entry.destinations

    def coming(self, request: Request, worker_id: WorkerId) -> tuple[int, ...]:
        """Indices of the items that it waits for and that are under way to a prefill worker."""
        return tuple(
            index
            for index, item in enumerate(request.items)
            if self.goes_to(worker_id, item.key)
            and (request, index) in self._entries[item.key].waiters
        )

    def retune(self, knobs: Knobs) -> None:
        """Queue everything anew, by other knobs."""
        queues, self._queues, self._knobs = self._queues, {}, knobs
        for queue in queues.values():
            for entry in queue:
                self._enqueue(entry)

    def drop(self, request: Request) -> list[tuple[BatchId, Batch]]:
        """A request is closed; the batches that nobody waits for now, which are forgotten."""
        orphans = []
        for key in dict.fromkeys(item.key for item in request.items):
            entry = self._entries.get(key)
            if entry is None or all(waiter is not request for waiter, _ in entry.waiters):
                continue
            if entry.batch_id is None:
                self._dequeue(entry)
            entry.waiters = [waiter for waiter in entry.waiters if waiter[0] is not request]
            if entry.waiters:
                if entry.batch_id is None:
                    self._enqueue(entry)
                continue
            batch = self._batches.get(entry.batch_id) if entry.batch_id is not None else None
            if batch is None:
                del self._entries[key]
            elif not any(other.waiters for other in batch.entries):
                assert entry.batch_id is not None
                orphans.append((entry.batch_id, batch))
                self.take(entry.batch_id)
        request.pending = set()
        return orphans

    def waiting(self) -> Iterator[Request]:
        """The requests that wait for an item in the queue, each as often as it does."""
        for queue in self._queues.values():
            for entry in queue:
                yield from (request for request, _ in entry.waiters)

    def candidates(self, max_items: int, max_tokens: int, admits: Admits) -> list[Candidate]:
        """What could go, the one with the first item first; of requests that the gate admits."""
        found = [
            candidate
            for queue in self._queues.values()
            if (candidate := _candidate(queue, max_items, max_tokens, admits)).entries
        ]
        return sorted(found, key=lambda candidate: self._place(candidate.entries[0]))

    def _place(self, entry: Entry) -> tuple[int, int]:
        if self._knobs.order is Order.FIFO:
            return 0, entry.number
        slo_s = self._knobs.ttft_slo_s
        return min(request.due_ns(slo_s) for request, _ in entry.waiters), entry.number

    def _enqueue(self, entry: Entry) -> None:
        size = entry.item.num_tokens if self._knobs.group_by_size else 0
        entry.kind = Kind(entry.item.modality, size, entry.suspects)
        insort(self._queues.setdefault(entry.kind, []), entry, key=self._place)

    def _dequeue(self, entry: Entry) -> None:
        queue = self._queues[entry.kind]
        queue.remove(entry)
        if not queue:
            del self._queues[entry.kind]

    # Batches ----------------------------------------------------------------------------------

    def start(self, entries: Sequence[Entry], worker_id: WorkerId) -> tuple[BatchId, Batch]:
        """Take queued items into a batch; the destinations of all who wait are drawn."""
        for entry in entries:
            self._dequeue(entry)
        return self._start(entries, worker_id, forward=True)

    def send(
        self, request: Request, indices: Iterable[int], worker_id: WorkerId, now_ns: int
    ) -> tuple[BatchId, Batch]:
        """A batch of items that an encoder has already, for one request."""
        entries: dict[str, Entry] = {}
        for index in indices:
            item = request.items[index]
            if item.key not in entries:
                entries[item.key] = self._new(item, now_ns)
            entries[item.key].waiters.append((request, index))
        return self._start([*entries.values()], worker_id, forward=False)

    def _start(
        self, entries: Sequence[Entry], worker_id: WorkerId, forward: bool
    ) -> tuple[BatchId, Batch]:
        self._last_batch += 1
        batch_id = BatchId(self._last_batch)
        for entry in entries:
            entry.batch_id = batch_id
            for request, index in entry.waiters:
                assert request.destination is not None, "drawn before the batch is started"
                entry.destinations.add(request.destination)
                request.pending.discard(index)
                request.sent.add(index)
        batch = self._batches[batch_id] = Batch(worker_id, tuple(entries), forward)
        return batch_id, batch

    def take(self, batch_id: BatchId) -> Batch | None:
        """Forget a batch; its items nobody waits for are forgotten, too."""
        batch = self._batches.pop(batch_id, None)
        for entry in batch.entries if batch else ():
            if not entry.waiters:
                del self._entries[entry.item.key]
        return batch

    def finished(self, batch: Batch) -> list[Request]:
        """The embeddings are there; the requests that waited for nothing else."""
        waiters = [waiter for entry in batch.entries for waiter in entry.waiters]
        for entry in batch.entries:
            self._entries.pop(entry.item.key, None)
        held_back = [(request, index) for request, index in waiters if index in request.pending]
        for request, index in held_back:
            request.pending.discard(index)
        return list(dict.fromkeys(request for request, _ in held_back if not request.pending))

    def put_back(self, batch: Batch, num_parts: int) -> None:
        """Queue the items of a failed batch again, where they stood, as so many groups of suspects.

        A batch of one item is no suspect: its fault would be known. Who waits is held back again.
        """
        entries = [entry for entry in batch.entries if entry.waiters]
        size = ceil(len(entries) / num_parts)
        for begin in range(0, len(entries), max(size, 1)):
            self._last_suspects += 1
            for entry in entries[begin : begin + size]:
                if len(batch.entries) > 1:
                    entry.suspects = self._last_suspects
                entry.batch_id = None
                entry.destinations.clear()
                for request, index in entry.waiters:
                    request.pending.add(index)
                self._enqueue(entry)

    def lost(self, worker_id: WorkerId) -> list[Batch]:
        """The batches of an engine that ended, which are forgotten; nothing is on its way there,
        even if it comes back.
        """
        for entry in self._entries.values():
            entry.destinations.discard(worker_id)
        lost = [id_ for id_, batch in self._batches.items() if batch.worker_id == worker_id]
        return [batch for batch_id in lost if (batch := self.take(batch_id)) is not None]


def requests_of(entries: Iterable[Entry]) -> list[Request]:
    """Everybody who waits for one of them, once."""
    return list(dict.fromkeys(request for entry in entries for request, _ in entry.waiters))


def _candidate(
    queue: Sequence[Entry], max_items: int, max_tokens: int, admits: Admits
) -> Candidate:
    """An item that alone is larger than a call may be goes alone.

    One that several wait for may go as soon as one of them may.
    """
    taken: list[Entry] = []
    num_tokens = 0
    for entry in queue:  # long, when all is held back: a plain loop is several times faster
        for request, _ in entry.waiters:
            if admits(request):
                break
        else:
            continue
        num_more = num_tokens + entry.item.num_tokens
        if len(taken) == max_items or (taken and num_more > max_tokens):
            return Candidate(taken, 0, len(queue))
        taken.append(entry)
        num_tokens = num_more
    mean_tokens = max(1, num_tokens // max(1, len(taken)))
    room = min(max_items - len(taken), (max_tokens - num_tokens) // mean_tokens)
    return Candidate(taken, room, len(queue))
