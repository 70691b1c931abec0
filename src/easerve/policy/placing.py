"""Where a request is prefilled: the side is drawn, then an engine of that side is chosen."""

from collections.abc import Sequence

from easerve.policy.directory import Directory
from easerve.policy.estimates import Times
from easerve.policy.knobs import Knobs
from easerve.policy.offload import Candidate, Load, Offload
from easerve.policy.pool import Pool, Worker
from easerve.policy.state import Request
from easerve.types import Side, WorkerId

BESIDE, HOLDS, LEAST = "beside its encoder", "holds embeddings", "least backlog"


class Placing:
    """Brings rule, engines and the directory of embeddings together."""

    def __init__(self, knobs: Knobs, pool: Pool, directory: Directory, times: Times) -> None:
        self._pool, self._directory, self._times = pool, directory, times
        self.offload = Offload(knobs)

    def place(
        self, requests: Sequence[Request], now_ns: int, encoder_id: WorkerId | None = None
    ) -> None:
        """Draw the destinations of those who have none; ``encoder_id``: encodes for them.

        A request keeps its destination, for all its items and legs, until that one fails.
        """
        new = [request for request in requests if self._pool.get(request.destination) is None]
        if new:
            self._draw(new, now_ns, encoder_id)
        for request in requests:
            self._hold(request)

    def _draw(self, requests: Sequence[Request], now_ns: int, encoder_id: WorkerId | None) -> None:
        num_workers = {side: len(workers) for side, workers in self._pool.sides().items()}
        load = Load(self.backlogs_s(now_ns), self._times.prefill_token_s, num_workers)
        placements = self.offload.place([*map(self._candidate, requests)], load, now_ns)
        for request, placement in zip(requests, placements, strict=True):
            request.placement = placement
        # The longest first, so that the workers of a side get about the same.
        for request in sorted(requests, key=lambda each: -each.shape.num_prompt_tokens):
            request.destination = self._choose(request, encoder_id).worker_id
            self._hold(request)

    def _hold(self, request: Request) -> None:
        """Its prefill is on the way, until a leg is."""
        worker = self._pool.get(request.destination)
        assert worker is not None, "just drawn, or still there"
        if request.needs_prefill:
            worker.hold(request.request_id, request.shape.num_prompt_tokens)

    def least_and_most_s(self, now_ns: int) -> tuple[float, float]:
        """Backlog of the sides that prefills may go to. The most counts only where the share is
        kept, whatever the backlogs: else the side with less takes what comes.
        """
        backlogs_s = self.backlogs_s(now_ns)
        used_s = [backlogs_s[side] for side in self.offload.shares(backlogs_s)]
        return min(used_s), (max if self.offload.keeps_share else min)(used_s)

    @property
    def num_prefills(self) -> float:
        """As many prefill workers as those are worth that there are, with the shares they get."""
        workers = self._pool.sides()
        shares = self.offload.shares(workers).items()
        return min((len(workers[side]) / share for side, share in shares), default=0.0)

    def backlog_tokens(self) -> dict[Side, int]:
        """Of the least loaded prefill worker of each side."""
        return {
            side: min(worker.backlog_tokens for worker in workers)
            for side, workers in self._pool.sides().items()
        }

    def backlogs_s(self, now_ns: int) -> dict[Side, float]:
        """Of the least loaded prefill worker of each side."""
        token_s = self._times.prefill_token_s
        return {
            side: min(worker.backlog_s(token_s, now_ns) for worker in workers)
            for side, workers in self._pool.sides().items()
        }

    def _candidate(self, request: Request) -> Candidate:
        sides = self._pool.sides()
        able = {
            side
            for side, workers in sides.items()
            if any(worker.worker_id not in request.avoid for worker in workers)
        }
        saved_s = {
            side: max(self._saved_s(request, worker) for worker in workers)
            for side, workers in sides.items()
        }
        tokens = request.shape.num_prompt_tokens
        return Candidate(request.request_id, tokens, frozenset(able or sides), saved_s)

    def _saved_s(self, request: Request, worker: Worker) -> float:
        """Encoding that a prefill worker spares, as it has the embeddings."""
        keys = {item.key for item in request.items}
        num_held = sum(self._directory.holds(worker.worker_id, key) for key in keys)
        return self._times.items_s(num_held, 1)

    def _choose(self, request: Request, encoder_id: WorkerId | None) -> Worker:
        """A worker of its side: the one beside the encoder, or that with the least backlog in
        tokens, of which those are taken off that the embeddings it has are worth.
        """
        assert request.placement is not None, "its side is drawn"
        token_s, saved_s = self._times.prefill_token_s, dict[WorkerId, float]()

        def cost(worker: Worker) -> tuple[bool, bool, float, WorkerId]:
            saved_s[worker.worker_id] = self._saved_s(request, worker)
            saved = saved_s[worker.worker_id] / token_s if token_s else 0.0
            return (
                worker.worker_id in request.avoid,
                bool(worker.beside) and encoder_id not in worker.beside,
                worker.backlog_tokens - saved,
                worker.worker_id,
            )

        worker = min(self._pool.sides()[request.placement.side], key=cost)
        request.chosen = HOLDS if saved_s[worker.worker_id] else LEAST
        if encoder_id in worker.beside:
            request.chosen = BESIDE
        return worker
