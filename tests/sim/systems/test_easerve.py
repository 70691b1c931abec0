"""What is built of a scenario's section: engines, who is beside whom, what the core is told."""

from dataclasses import replace
from typing import Any

import pytest

from easerve.costs.base import Media
from easerve.costs.linear import LinearCosts
from easerve.policy import events as ev
from easerve.policy.partition import Layout
from easerve.sim import clock
from easerve.sim.config import EaserveSystem
from easerve.sim.sharing import machine
from easerve.sim.systems import easerve
from easerve.sim.systems.easerve import guess, surface
from easerve.types import Modality, Stage, WorkerId

from .simulated import pictures, text, world

COSTS = LinearCosts(0.5, 0.01, 0.2, 0.003, 0.1, 0.0)
PICTURE = Media(Modality.IMAGE, 100)
LOCAL: dict[str, Any] = {
    "encode": {"replicas": 4, "max_num_batched_tokens": 4096},
    "local_prefill": {"tensor_parallel_size": 2, "max_num_seqs": 7},
    "prefill": {"replicas": 1, "max_num_seqs": 8},
    "decode": {"replicas": 2, "max_num_seqs": 9},
    "policy": {"remote_share": 0.5},
}


def joined(content: dict[str, Any]) -> list[ev.WorkerJoined]:
    """As the core is told; every request has its answer."""
    told: list[ev.WorkerJoined] = []

    def observe(now_ns: int, events: Any, actions: Any) -> None:
        told.extend(event for event in events if isinstance(event, ev.WorkerJoined))

    requests = [pictures(2, at_s=float(at_s)) for at_s in range(4)]
    divisible = replace(world(requests), num_units=10)
    served = easerve.build(EaserveSystem.model_validate(content), divisible, observe=observe)
    clock.run(served, served.start())
    run = divisible.run
    assert [record.outcome for record in run.records] == ["completed"] * 4
    assert set(run.stages) == {worker.worker_id for worker in told}
    return told


def test_local_prefill_is_beside_as_many_encoders_as_it_has_ranks() -> None:
    told = {worker.worker_id: worker for worker in joined(LOCAL)}
    beside = {name: worker.beside for name, worker in told.items() if worker.beside}
    assert beside == {"l0": ("e0", "e1"), "l1": ("e2", "e3")}
    assert {name: told[WorkerId(name)].num_slots for name in ("l0", "p0", "d0", "d1")} == {
        "l0": 7,
        "p0": 8,
        "d0": 9,
        "d1": 9,
    }
    assert told[WorkerId("e3")].max_batch_tokens == 4096
    stages = [worker.stage for worker in told.values()]
    assert [stages.count(stage) for stage in Stage] == [4, 3, 2]


def test_on_a_cpu_local_prefill_and_its_encoder_share_the_cores_with_all_others() -> None:
    """Two pictures 3 s on one core, beside it a text's prefill and decode as if alone, or not."""
    ends = {}
    for cores in (4, 1):
        requests = [pictures(2), text(0.2)]
        there = replace(world(requests), machine=machine(cores))
        content = {**LOCAL, "policy": {"remote_share": 0.0}}
        served = easerve.build(EaserveSystem.model_validate(content), there)
        clock.run(served, served.start())
        ends[cores] = max(record.end_s or 0.0 for record in there.run.records)
        assert [record.outcome for record in there.run.records] == ["completed"] * 2
    assert ends[1] > 1.2 * ends[4]


def test_without_local_prefill_nobody_is_beside_anybody() -> None:
    content = {key: LOCAL[key] for key in ("encode", "prefill", "decode")}
    assert not any(worker.beside for worker in joined(content))


@pytest.mark.parametrize("how", ["dynamic", "static", "gate", "none"])
def test_a_divided_device_serves_as_well(how: str) -> None:
    policy = {"remote_share": 0.0, "how": how}
    assert joined({**LOCAL, "partition": {}, "policy": policy})


def test_the_cores_guess_is_what_linear_costs_are() -> None:
    found = guess(COSTS, PICTURE)
    for name in ("encode_base_s", "encode_token_s", "prefill_base_s", "prefill_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name))
    assert guess(COSTS, None).encode_s(1, 100) == 0.0


def test_the_surface_is_what_a_profile_would_have_measured() -> None:
    found = surface(COSTS, PICTURE, Layout(10, 4, 2))
    assert found.item_tokens == 100
    assert [batch for batch, _ in found.rows] == [1, 2, 4, 8, 16]
    one = dict(found.rows[0][1])
    assert one == pytest.approx({4: 1.5 / 0.4, 8: 1.5 / 0.8, 10: 1.5})
