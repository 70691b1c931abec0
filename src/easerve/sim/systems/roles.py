"""EPDServe's change of roles: when an engine leaves its stage for another, and which.

Every few seconds the lengths of the stages' queues decide (``resource_allocation.py``); decisions
are carried out one by one, when the engine has nothing left to do (``orchestrator.py``). What
waits between two stages counts for neither, and a decision may be old when its turn comes.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from easerve.sim.config import EpdServeSystem, RoleSwitch
from easerve.types import NS_PER_S, Stage

STAGES = (Stage.ENCODE, Stage.PREFILL, Stage.DECODE)


class Member(Protocol):
    @property
    def num_waiting(self) -> int: ...

    @property
    def is_empty(self) -> bool:
        """It has nothing to do, and holds nothing for others."""
        ...


class Pools(Protocol):
    def pool(self, stage: Stage) -> Sequence[Member]:
        """The engines of a stage, the one included that is to leave it."""
        ...

    def retire(self, stage: Stage) -> None:
        """The last engine of a stage takes nothing new."""
        ...

    def move(self, source: Stage, target: Stage, now_ns: int) -> None:
        """It is empty, and joins another stage."""
        ...


class Roles:
    def __init__(self, config: EpdServeSystem, switch: RoleSwitch) -> None:
        self._period_ns = round(switch.period_s * NS_PER_S)
        self._poll_ns = round(switch.poll_s * NS_PER_S)
        self._next_decision_ns, self._next_poll_ns = self._period_ns, self._poll_ns
        self._decisions: deque[tuple[Stage, Stage]] = deque()
        self._moving: tuple[Stage, Stage] | None = None
        sections = {
            Stage.ENCODE: config.encode,
            Stage.PREFILL: config.prefill,
            Stage.DECODE: config.decode,
        }
        self._sizes = {stage: each.tensor_parallel_size for stage, each in sections.items()}

    @property
    def deadline_ns(self) -> int:
        if self._moving is not None:
            return self._next_decision_ns
        return min(self._next_decision_ns, self._next_poll_ns)

    def settle(self, pools: Pools, now_ns: int) -> None:
        if now_ns >= self._next_decision_ns:
            self._next_decision_ns += self._period_ns
            decision = self._decide(pools)
            if decision is not None:
                self._decisions.append(decision)
        if self._moving is None and now_ns >= self._next_poll_ns:
            self._begin(pools, now_ns)
        if self._moving is not None and pools.pool(self._moving[0])[-1].is_empty:
            pools.move(*self._moving, now_ns)
            self._moving, self._next_poll_ns = None, now_ns + self._poll_ns

    def _decide(self, pools: Pools) -> tuple[Stage, Stage] | None:
        waiting = {
            stage: sum(engine.num_waiting for engine in pools.pool(stage)) for stage in STAGES
        }
        target = max(STAGES, key=lambda stage: waiting[stage])
        if all(2 * num >= waiting[target] for num in waiting.values()):
            return None
        sources = [stage for stage in STAGES if self._can_spare(pools, stage, target, waiting)]
        if not sources:
            return None
        return max(sources, key=lambda stage: len(pools.pool(stage))), target

    def _can_spare(
        self, pools: Pools, stage: Stage, target: Stage, waiting: Mapping[Stage, int]
    ) -> bool:
        return (
            waiting[stage] < waiting[target]
            and len(pools.pool(stage)) > 1
            and self._sizes[stage] == self._sizes[target]
        )

    def _begin(self, pools: Pools, now_ns: int) -> None:
        self._next_poll_ns = now_ns + self._poll_ns
        if not self._decisions:
            return
        source, target = self._decisions.popleft()
        if len(pools.pool(source)) > 1:
            self._moving = source, target
            pools.retire(source)
