"""What EAServe did in a run of ``easerve bench cpu``, from the steps of its core."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from easerve.cli import profile_cpu
from easerve.cli.bench.cpu_systems import Used
from easerve.policy import events as ev
from easerve.types import NS_PER_S, BatchId, RequestId, Side, WorkerId


class Interval(NamedTuple):
    """A call to an engine; seconds on the clock of the core."""

    worker_id: WorkerId
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """In what portions the stages had their work.

    ``items_per_call``: of the encoder, None where nothing was encoded. ``steps``: of engines, for
    a request, by stage. ``remote_share``: of the prefills.
    """

    items_per_call: float | None
    steps: Mapping[str, float]
    prompt_tokens: float
    remote_share: float


class Watch:
    """Takes the place of a decision log. ``expect`` begins a run."""

    def __init__(self) -> None:
        self.expect(0, dict)

    def expect(self, num_requests: int, used: Used) -> None:
        """``used`` is read at the first request and at the last answer."""
        self._used, self._num_left = used, num_requests
        self._before: Mapping[str, float] | None = None
        self._used_s: dict[str, float] | None = None
        self._calls: dict[BatchId, tuple[WorkerId, int]] = {}
        self._items: list[int] = []
        self._tokens: list[int] = []
        self._prefills: dict[RequestId, tuple[WorkerId, int]] = {}
        self._num_remote = 0
        self.encodes: list[Interval] = []
        self.prefills: list[Interval] = []

    def step(self, now_ns: int, events: Sequence[ev.Event], actions: Sequence[ev.Action]) -> None:
        if not self._num_left:
            return
        for event in events:
            self._hear(event, now_ns)
        for action in actions:
            self._see(action, now_ns)
        if not self._num_left:
            self._used_s = self._since()

    def _hear(self, event: ev.Event, now_ns: int) -> None:
        match event:
            case ev.RequestReceived() if self._before is None:
                self._before = self._used()
            case ev.Prepared():
                self._tokens.append(event.shape.num_prompt_tokens)
            case ev.EncodeFinished() if event.batch_id in self._calls:
                self.encodes.append(_interval(*self._calls.pop(event.batch_id), now_ns))
            case ev.PrefillFinished() if event.request_id in self._prefills:
                worker_id, begin_ns = self._prefills.pop(event.request_id)
                begin_ns = min(now_ns, begin_ns + round(event.wait_s * NS_PER_S))
                self.prefills.append(_interval(worker_id, begin_ns, now_ns))
            case _:
                pass

    def _see(self, action: ev.Action, now_ns: int) -> None:
        match action:
            case ev.StartEncode() if action.forward:
                self._calls[action.batch_id] = action.worker_id, now_ns
                self._items.append(len(action.items))
            case ev.StartPrefill():
                self._prefills[action.request_id] = action.worker_id, now_ns
                self._num_remote += action.placement.side is Side.REMOTE
            case ev.Complete() | ev.Fail() | ev.Reject():
                self._num_left -= 1
            case _:
                pass

    def _since(self) -> dict[str, float]:
        return profile_cpu.since(self._before or {}, self._used())

    def used_s(self) -> dict[str, float]:
        """CPU seconds of the run by process; until now if some requests have not ended."""
        return self._since() if self._used_s is None else self._used_s

    def sizes(self, steps: Mapping[str, float]) -> Sizes:
        """``steps``: that engines have made in the run, by stage."""
        num = max(1, len(self._tokens))
        return Sizes(
            fmean(self._items) if self._items else None,
            {stage: each / num for stage, each in steps.items()},
            sum(self._tokens) / num,
            self._num_remote / num,
        )

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _interval(worker_id: WorkerId, begin_ns: int, end_ns: int) -> Interval:
    return Interval(worker_id, begin_ns / NS_PER_S, end_ns / NS_PER_S)
