"""The engines the core knows, and what each of them holds."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from easerve.policy.offload import least_backlog
from easerve.types import Stage, WorkerId


@dataclass(slots=True)
class Worker:
    """An engine and the work it holds, in tokens by what they are for."""

    worker_id: WorkerId
    stage: Stage
    work: dict[Hashable, int] = field(default_factory=dict)
    backlog_tokens: int = 0

    def hold(self, key: Hashable, tokens: int) -> None:
        self.release(key)
        self.work[key] = tokens
        self.backlog_tokens += tokens

    def release(self, key: Hashable) -> None:
        self.backlog_tokens -= self.work.pop(key, 0)


class Pool:
    """Engines by id. ``starved_since``: the stages that have none, and since when (ns)."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, Worker] = {}
        self.starved_since: dict[Stage, int] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def join(self, worker_id: WorkerId, stage: Stage) -> None:
        self._workers[worker_id] = Worker(worker_id, stage)

    def lose(self, worker_id: WorkerId) -> bool:
        """Forget an engine and what it held; False when it was not known."""
        return self._workers.pop(worker_id, None) is not None

    def get(self, worker_id: WorkerId | None) -> Worker | None:
        return None if worker_id is None else self._workers.get(worker_id)

    def has(self, *stages: Stage) -> bool:
        """Whether each of the stages has an engine."""
        return {worker.stage for worker in self}.issuperset(stages)

    def pick(
        self, stage: Stage, avoid: Iterable[WorkerId] = (), idle: bool = False
    ) -> Worker | None:
        """The engine of a stage with the least backlog; ``idle``: only one that holds nothing."""
        backlog = {
            worker.worker_id: worker.backlog_tokens
            for worker in self
            if worker.stage is stage and not (idle and worker.work)
        }
        return self.get(least_backlog(backlog, frozenset(avoid)))

    def release(self, worker_id: WorkerId | None, key: Hashable) -> None:
        """Take work from an engine, if it is still there."""
        worker = self.get(worker_id)
        if worker is not None:
            worker.release(key)

    def note_starved_stages(self, now_ns: int) -> None:
        for stage in Stage:
            if self.has(stage):
                self.starved_since.pop(stage, None)
            else:
                self.starved_since.setdefault(stage, now_ns)
