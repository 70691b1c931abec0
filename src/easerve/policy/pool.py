"""The engines the core knows, and what each of them holds."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from easerve.policy.events import DEFAULT_BATCH_TOKENS, DEFAULT_SLOTS
from easerve.types import NS_PER_S, Side, Stage, WorkerId


@dataclass(slots=True)
class Worker:
    """An engine and the work it holds, in tokens by what they are for.

    ``num_slots``: requests that it runs at once. ``max_batch_tokens``: of one call to an encoder.
    ``beside``: the encoders whose devices a local prefill engine shares.
    """

    worker_id: WorkerId
    stage: Stage
    num_slots: int = DEFAULT_SLOTS
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS
    beside: tuple[WorkerId, ...] = ()
    work: dict[Hashable, int] = field(default_factory=dict)
    backlog_tokens: int = 0
    running: dict[Hashable, int] = field(default_factory=dict)
    """What of the work is under way, and when it began, in that order."""
    progress_ns: int = 0
    """When it last finished something."""

    @property
    def side(self) -> Side:
        return Side.LOCAL if self.beside else Side.REMOTE

    def hold(self, key: Hashable, tokens: int) -> None:
        """Work that is on its way here, or here and waits for its embeddings."""
        self.release(key)
        self.work[key] = tokens
        self.backlog_tokens += tokens

    def start(self, key: Hashable, tokens: int, now_ns: int) -> None:
        """Work that begins."""
        self.hold(key, tokens)
        self.running[key] = now_ns

    def begin(self, key: Hashable, now_ns: int) -> None:
        """Work that was held, if it still is, begins."""
        if key in self.work:
            self.running.setdefault(key, now_ns)

    def release(self, key: Hashable) -> None:
        self.backlog_tokens -= self.work.pop(key, 0)
        self.running.pop(key, None)

    def finish(self, key: Hashable, since_ns: int, now_ns: int) -> float:
        """Work that began at ``since_ns`` has ended; the seconds it took, or since what ended
        before it.
        """
        since_ns = min(max(self.progress_ns, since_ns), now_ns)
        self.progress_ns = now_ns
        self.release(key)
        return (now_ns - since_ns) / NS_PER_S

    def backlog_s(self, token_s: float, now_ns: int) -> float:
        """Seconds of work, less what should be done by now of the piece that began first."""
        done_s = 0.0
        for key, began_ns in self.running.items():  # the first of them
            since_ns = max(self.progress_ns, began_ns)
            done_s = min((now_ns - since_ns) / NS_PER_S, self.work[key] * token_s)
            break
        return self.backlog_tokens * token_s - done_s


class Pool:
    """Engines by id. ``starved_since``: the stages that have none, and since when (ns)."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, Worker] = {}
        self._by_stage: dict[Stage, list[Worker]] = {}
        self._sides: dict[Side, list[Worker]] = {}
        self._locals: dict[WorkerId, Worker] = {}
        """The prefill engine beside each encoder."""
        self.starved_since: dict[Stage, int] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def join(self, worker: Worker) -> None:
        self._workers[worker.worker_id] = worker
        self._sort()

    def lose(self, worker_id: WorkerId) -> bool:
        """Forget an engine and what it held; False when it was not known."""
        known = self._workers.pop(worker_id, None) is not None
        self._sort()
        return known

    def _sort(self) -> None:
        """As is asked for at every step."""
        self._by_stage, self._sides = {}, {}
        for worker in self:
            self._by_stage.setdefault(worker.stage, []).append(worker)
        for worker in self.of(Stage.PREFILL):
            self._sides.setdefault(worker.side, []).append(worker)
        self._locals = {
            encoder: worker for worker in self.of(Stage.PREFILL) for encoder in worker.beside
        }

    def get(self, worker_id: WorkerId | None) -> Worker | None:
        return None if worker_id is None else self._workers.get(worker_id)

    def has(self, *stages: Stage) -> bool:
        """Whether each of the stages has an engine."""
        return self._by_stage.keys() >= set(stages)

    def of(self, stage: Stage) -> Sequence[Worker]:
        return self._by_stage.get(stage, ())

    def sides(self) -> Mapping[Side, list[Worker]]:
        """The prefill engines, by side; a side without any is left out."""
        return self._sides

    def pick(
        self, stage: Stage, avoid: Collection[WorkerId] = (), max_work: int | None = None
    ) -> Worker | None:
        """The engine of a stage with the least backlog, of those that hold at most ``max_work``.

        Of encoders alike, the one beside which prefill has the least. ``avoid``: workers that
        failed this request before, taken only when there is no other.
        """

        def cost(worker: Worker) -> tuple[bool, int, int, WorkerId]:
            beside = self._locals.get(worker.worker_id)
            beside_tokens = 0 if beside is None else beside.backlog_tokens
            avoided = worker.worker_id in avoid
            return avoided, worker.backlog_tokens, beside_tokens, worker.worker_id

        able = (each for each in self.of(stage) if max_work is None or len(each.work) <= max_work)
        return min(able, key=cost, default=None)

    def release(self, worker_id: WorkerId | None, key: Hashable) -> None:
        """Take work from an engine, if it is still there."""
        worker = self.get(worker_id)
        if worker is not None:
            worker.release(key)

    def note_starved_stages(self, now_ns: int) -> None:
        for stage in self._by_stage:
            self.starved_since.pop(stage, None)
        for stage in Stage if len(self._by_stage) < len(Stage) else ():
            if not self.has(stage):
                self.starved_since.setdefault(stage, now_ns)
