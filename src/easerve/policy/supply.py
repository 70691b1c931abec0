"""Sees to it that embeddings get to the engines that prefill with them: calls to encoders."""

from collections.abc import Iterator

from easerve.policy.directory import Directory
from easerve.policy.encoding import Batch, Encoding
from easerve.policy.events import Decision, EncodeItem, StartEncode, Waiter
from easerve.policy.microbatch import Closing, MicroBatcher
from easerve.policy.partition import Demand, Partition
from easerve.policy.pool import Pool
from easerve.policy.state import Request
from easerve.types import BatchId, Stage, WorkerId

HELD = "the encoder has them"


class Supply:
    """Brings the encode queue, the directory and the encoders together."""

    def __init__(
        self,
        pool: Pool,
        encoding: Encoding,
        directory: Directory,
        batcher: MicroBatcher,
        partition: Partition,
    ) -> None:
        self._pool, self._encoding = pool, encoding
        self._directory, self._batcher, self._partition = directory, batcher, partition

    def want_unknown(self, request: Request, now_ns: int) -> bool:
        """Queue the items of a request that nobody has; whether any of them is new."""
        some_new = False
        for index, item in enumerate(request.items):
            if next(self._directory.holders(item.key), None) is None:
                some_new |= self._encoding.want(request, index, now_ns)
        return some_new

    def start(self, closing: Closing, now_ns: int) -> StartEncode:
        """A batch, with the destinations of all who wait for it drawn."""
        worker = closing.worker
        batch_id, batch = self._encoding.start(closing.entries, worker.worker_id)
        worker.start(batch_id, batch.num_tokens, now_ns)
        demand = self._partition.demand(worker.backlog_tokens)
        return _call(batch_id, batch, closing.decision, demand)

    def complete(self, request: Request, now_ns: int) -> Iterator[StartEncode]:
        """Every embedding is at the request's destination, or on the way there, or is waited for.

        It is sent by an encoder that has it, or encoded. What is queued, or under way to somewhere
        else, is waited for.
        """
        destination, sending = request.destination, dict[WorkerId, list[int]]()
        assert destination is not None, "drawn before anything is sent"
        for index, item in enumerate(request.items):
            if self._directory.holds(destination, item.key) and index not in request.pending:
                continue
            holder = self._encoder_with(item.key, request)
            if holder is None or self._encoding.has(item.key):
                self._encoding.want(request, index, now_ns)
            else:
                sending.setdefault(holder, []).append(index)
        for encoder_id, indices in sending.items():
            batch_id, batch = self._encoding.send(request, indices, encoder_id, now_ns)
            decision = self._batcher.decision(batch.entries, HELD, now_ns)
            yield _call(batch_id, batch, decision, self._partition.standing)

    def _encoder_with(self, key: str, request: Request) -> WorkerId | None:
        """An encoder that has an embedding, and has not failed the request."""
        holders = (each for each in self._directory.holders(key) if each not in request.avoid)
        workers = map(self._pool.get, holders)
        encoders = (each.worker_id for each in workers if each and each.stage is Stage.ENCODE)
        return next(encoders, None)

    def arrived(self, batch: Batch) -> None:
        """The encoder has it, and so has every destination that is still there."""
        for entry in batch.entries:
            for holder in (batch.worker_id, *sorted(entry.destinations)):
                self._directory.gained(holder, entry.item.key)

    def num_held(self, request: Request, worker_id: WorkerId) -> int:
        """Items that a prefill worker has, though they were not sent there for this request."""
        return sum(
            index not in request.sent and self._directory.holds(worker_id, item.key)
            for index, item in enumerate(request.items)
        )


def _call(batch_id: BatchId, batch: Batch, decision: Decision, demand: Demand) -> StartEncode:
    items = []
    for entry in batch.entries:
        waiters = []
        for request, index in entry.waiters:
            assert request.destination is not None, "drawn before the batch is started"
            waiters.append(Waiter(request.request_id, index, request.destination))
        items.append(EncodeItem(entry.item, tuple(waiters)))
    return StartEncode(batch_id, batch.worker_id, tuple(items), decision, batch.forward, demand)
