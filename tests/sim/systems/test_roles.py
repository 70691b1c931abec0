from collections.abc import Sequence
from dataclasses import dataclass, field

from easerve.sim.config import EpdServeSystem, RoleSwitch
from easerve.sim.systems.roles import Roles
from easerve.types import NS_PER_S, Stage

E, P, D = Stage.ENCODE, Stage.PREFILL, Stage.DECODE


@dataclass(eq=False, slots=True)
class Engine:
    num_waiting: int = 0
    is_empty: bool = True


@dataclass(slots=True)
class Pools:
    """``waiting``: at the first engine of each stage."""

    engines: dict[Stage, list[Engine]]
    retired: list[Stage] = field(default_factory=list)
    moves: list[tuple[Stage, Stage, float]] = field(default_factory=list)

    def pool(self, stage: Stage) -> Sequence[Engine]:
        return self.engines[stage]

    def retire(self, stage: Stage) -> None:
        self.retired.append(stage)

    def move(self, source: Stage, target: Stage, now_ns: int) -> None:
        self.engines[target].append(self.engines[source].pop())
        self.moves.append((source, target, now_ns / NS_PER_S))


def pools(nums: Sequence[int], waiting: Sequence[int]) -> Pools:
    engines = {
        stage: [Engine(num_waiting if not index else 0) for index in range(num)]
        for stage, num, num_waiting in zip((E, P, D), nums, waiting, strict=True)
    }
    return Pools(engines)


def roles(prefill_gpus: int = 1) -> Roles:
    sections = {"encode": {}, "prefill": {"tensor_parallel_size": prefill_gpus}, "decode": {}}
    return Roles(EpdServeSystem.model_validate(sections), RoleSwitch())


def drive(policy: Roles, engines: Pools, until_s: float) -> Pools:
    """Settle whenever it wants to be."""
    while policy.deadline_ns <= until_s * NS_PER_S:
        policy.settle(engines, policy.deadline_ns)
    return engines


def test_the_longest_queue_gets_an_engine_of_the_stage_with_most() -> None:
    assert drive(roles(), pools((1, 3, 4), (9, 0, 0)), 7).moves == [(D, E, 6)]
    assert drive(roles(), pools((1, 4, 4), (9, 0, 0)), 7).moves == [(P, E, 6)]


def test_queues_that_are_half_as_long_are_equal() -> None:
    assert not drive(roles(), pools((3, 3, 3), (8, 4, 4)), 30).moves
    assert drive(roles(), pools((3, 3, 3), (8, 4, 3)), 7).moves == [(P, E, 6)]
    assert not drive(roles(), pools((3, 3, 3), (0, 0, 0)), 30).moves


def test_only_a_shorter_queue_gives_an_engine() -> None:
    assert drive(roles(), pools((1, 3, 3), (0, 8, 8)), 30).moves == []


def test_engines_of_other_sizes_stay() -> None:
    assert not drive(roles(prefill_gpus=2), pools((1, 3, 1), (9, 0, 0)), 30).moves
    assert drive(roles(prefill_gpus=2), pools((1, 3, 2), (9, 0, 0)), 7).moves == [(D, E, 6)]


def test_an_engine_moves_when_it_is_empty_and_others_wait_for_that() -> None:
    policy, engines = roles(), pools((1, 1, 3), (9, 0, 0))
    engines.engines[D][-1].is_empty = False
    drive(policy, engines, 12)
    assert engines.retired == [D]
    assert not engines.moves
    engines.engines[D][-1].is_empty = True
    policy.settle(engines, 13 * NS_PER_S)
    assert engines.moves == [(D, E, 13)]
    # What was decided at 10 s is carried out now, two seconds after the move.
    drive(policy, engines, 15)
    assert engines.moves[1:] == [(D, E, 15)]


def test_an_old_decision_is_dropped_when_there_is_nobody_to_spare() -> None:
    policy, engines = roles(), pools((1, 1, 2), (9, 0, 0))
    engines.engines[D][-1].is_empty = False
    drive(policy, engines, 20)
    engines.engines[D][-1].is_empty = True
    policy.settle(engines, 21 * NS_PER_S)
    drive(policy, engines, 60)
    assert engines.moves == [(D, E, 21)]
    assert engines.retired == [D]
