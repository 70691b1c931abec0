"""Closes encode batches: brings queue, rule, credits and encoders together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from easerve.policy.arrivals import Arrivals
from easerve.policy.batching import FULL, PASS_THROUGH, RULES, Hold, View, decide
from easerve.policy.encoding import Candidate, Encoding, Entry, requests_of
from easerve.policy.estimates import Times
from easerve.policy.events import Decision
from easerve.policy.gate import Opening
from easerve.policy.knobs import Knobs
from easerve.policy.pool import Pool, Worker
from easerve.types import NS_PER_S, Stage

TTFT_MARGIN = 0.05


@dataclass(frozen=True, slots=True)
class Closing:
    """A batch for an encoder, to be started now."""

    worker: Worker
    entries: Sequence[Entry]
    decision: Decision


class MicroBatcher:
    """``wake_ns``: when to ask again at the latest, after ``close`` gave nothing."""

    def __init__(self, knobs: Knobs, encoding: Encoding, times: Times) -> None:
        self._encoding, self._times = encoding, times
        self.arrivals = Arrivals()
        self.draining = False
        self.wake_ns: int | None = None
        self._held_ns: int | None = None
        self._held_by = ""
        self.retune(knobs)

    def retune(self, knobs: Knobs) -> None:
        """Go by other knobs from now on."""
        self._knobs, self._rule = knobs, RULES[knobs.when](knobs)
        self._encoding.retune(knobs)

    def rest(self) -> None:
        """Nothing waits."""
        self.wake_ns = self._held_ns = None

    def close(self, pool: Pool, gate: Opening, backlog_s: float, now_ns: int) -> Iterator[Closing]:
        """The next batch, if one is to go now; several where it is spread over idle encoders.

        Each has to be started before the next is asked for. ``backlog_s``: of the least loaded
        prefill worker that it may be for.
        """
        self.wake_ns = None
        if not self._encoding.num_queued:
            self.rest()
        elif not self._rule.waits:
            (first, *_) = self._encoding.candidates(1, 0, gate.admits)
            yield self._closing(first.entries, PASS_THROUGH, pool, None, now_ns)
        elif pool.pick(Stage.ENCODE, max_work=self._knobs.run_ahead) is not None:
            yield from self._choose(pool, gate, backlog_s, now_ns)

    def _choose(
        self, pool: Pool, gate: Opening, backlog_s: float, now_ns: int
    ) -> Iterator[Closing]:
        encoders = pool.of(Stage.ENCODE)
        num_idle = sum(not worker.work for worker in encoders)
        max_tokens = min(worker.max_batch_tokens for worker in encoders)
        for candidate in self._encoding.candidates(
            self._knobs.max_batch_items, max_tokens, gate.admits
        ):
            hold = self._hold(candidate, backlog_s, now_ns)
            due = hold.until_ns <= now_ns
            if due and (num_idle or candidate.may_run_ahead):
                size = self._part(candidate, num_idle)
                for begin in range(0, len(candidate.entries), size):
                    part = candidate.entries[begin : begin + size]
                    yield self._closing(
                        part, hold.reason, pool, 0 if num_idle else self._knobs.run_ahead, now_ns
                    )
                    self._held_ns = None
                return
            if due:
                break  # it goes to the first encoder that is idle, and nothing ahead of it
            if num_idle:
                self._wake(hold.until_ns)
        if gate.allowed is None or all(map(gate.admits, self._encoding.waiting())):
            self._held_ns = None
        elif self._held_ns is None:
            self._held_ns, self._held_by = now_ns, gate.held_by

    def _hold(self, candidate: Candidate, backlog_s: float, now_ns: int) -> Hold:
        if candidate.full:
            return Hold(now_ns, FULL)
        return decide(self._rule, self._view(candidate, backlog_s, now_ns), self.draining)

    def _wake(self, at_ns: int) -> None:
        self.wake_ns = at_ns if self.wake_ns is None else min(self.wake_ns, at_ns)

    def _closing(
        self,
        entries: Sequence[Entry],
        reason: str,
        pool: Pool,
        max_work: int | None,
        now_ns: int,
    ) -> Closing:
        worker = pool.pick(Stage.ENCODE, requests_of(entries)[0].avoid, max_work)
        assert worker is not None, "there is one with so little work"
        return Closing(worker, entries, self.decision(entries, reason, now_ns))

    def decision(self, entries: Sequence[Entry], reason: str, now_ns: int) -> Decision:
        """What is written down of a batch that is started now."""
        oldest_ns = min(entry.since_ns for entry in entries)
        held_ns = now_ns if self._held_ns is None else max(self._held_ns, oldest_ns)
        held_s = (now_ns - held_ns) / NS_PER_S
        return Decision(
            reason,
            (now_ns - oldest_ns) / NS_PER_S,
            held_s,
            self._held_by if held_s else "",
            self._encoding.num_queued - sum(entry.batch_id is None for entry in entries),
            self.arrivals.rate_per_s(now_ns),
            self.arrivals.cv,
        )

    def _part(self, candidate: Candidate, num_idle: int) -> int:
        """Items of a batch for each encoder: all, or fewer when the time saved outweighs the calls.

        Sharing ``q`` items among ``k`` encoders saves each of them the difference of the service
        times and costs ``k - 1`` base costs.
        """
        num_items = len(candidate.entries)
        size = min(num_items, ceil(candidate.num_queued / max(1, num_idle)))
        if not self._knobs.spread or size == num_items:
            return num_items
        tokens = sum(entry.item.num_tokens for entry in candidate.entries)
        whole_s = self._times.encode.at(tokens)
        part_s = self._times.encode.at(tokens * size / num_items)
        base_s, _ = self._times.encode.line()
        num_more = ceil(num_items / size) - 1
        return size if num_items * (whole_s - part_s) > num_more * base_s else num_items

    def _view(self, candidate: Candidate, backlog_s: float, now_ns: int) -> View:
        entries, times = candidate.entries, self._times
        tokens = sum(entry.item.num_tokens for entry in entries)
        base_s, token_s = times.encode.line()
        service_s = times.encode.at(tokens)
        oldest_ns = min(entry.since_ns for entry in entries)
        last_ns = self.arrivals.last_ns
        return View(
            now_ns,
            len(entries),
            candidate.room,
            oldest_ns,
            oldest_ns if last_ns is None else last_ns,
            self.arrivals.gap_s(now_ns),
            self.arrivals.cv,
            base_s,
            token_s * tokens / len(entries),
            service_s,
            backlog_s,
            self._slo_ns(entries, service_s + backlog_s),
        )

    def _slo_ns(self, entries: Sequence[Entry], until_prefill_s: float) -> int | None:
        """The latest start that keeps the TTFT of all, with a margin."""
        slo_s = self._knobs.ttft_slo_s
        if slo_s is None:
            return None
        token_s, spare_s = self._times.prefill_token_s, until_prefill_s + TTFT_MARGIN * slo_s
        return min(
            request.due_ns(slo_s)
            - int((request.shape.num_prompt_tokens * token_s + spare_s) * NS_PER_S)
            for request in requests_of(entries)
        )
