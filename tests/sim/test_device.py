import dataclasses
import random

import pytest

from easerve.cli import gpu_steps
from easerve.engines.partition import contention, sweep
from easerve.engines.partition.contention import Row
from easerve.engines.partition.sweep import Device, Runs
from easerve.sim.device import EQUAL, NUM_SMS, Model, Sharing, SimulatedDevice
from easerve.types import NS_PER_S, Stage

QUIET = Model(noise=0, crowding=0, switch_s=0)
FORWARD_FLOPS = 0.382e12
"""Of ViT-L/14-336, by a count of its products."""
Result = dict[tuple[str, str], Row]


def seconds_of(device: SimulatedDevice, *stages: Stage, size: int = 8) -> list[float]:
    """Of work that begins at once on each stage, by its end."""
    begin_ns = device.now_ns()
    works = {
        stage: device.encode(size) if stage is Stage.ENCODE else device.prefill(size)
        for stage in stages
    }
    ends: dict[Stage, float] = {}
    while len(ends) < len(works):
        device.wait(0.01)
        for stage, done in works.items():
            if done() and stage not in ends:
                ends[stage] = (device.now_ns() - begin_ns) / NS_PER_S
    return [ends[stage] for stage in stages]


def divided(device: SimulatedDevice, encode: int, prefill: int) -> SimulatedDevice:
    device.confine(Stage.ENCODE, encode)
    device.confine(Stage.PREFILL, prefill)
    return device


def test_a_large_batch_is_bound_by_what_sms_can_compute() -> None:
    device = SimulatedDevice(0)
    least_s = 16 * FORWARD_FLOPS / (NUM_SMS * Model().sm_flops_per_s)
    assert least_s < device.encode_s(16, NUM_SMS) < 1.3 * least_s


def test_a_small_batch_is_bound_by_the_host_and_cannot_fill_the_device() -> None:
    device = SimulatedDevice(0)
    floor_s = Model().launch_s * Model().num_launches
    assert device.encode_s(1, NUM_SMS) == device.encode_s(1, 96) == floor_s
    assert device.encode_s(1, 8) > 5 * floor_s


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
def test_more_sms_never_take_longer_and_waves_make_plateaus(batch: int) -> None:
    device = SimulatedDevice(0)
    times = [device.encode_s(batch, sms) for sms in range(8, NUM_SMS + 1)]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) < len(times)


def test_prefill_takes_twice_as_long_on_half_of_the_sms() -> None:
    device = SimulatedDevice(0)
    assert device.prefill_s(4, 66) == pytest.approx(2 * device.prefill_s(4, 132), rel=0.1)


def test_work_takes_in_virtual_time_what_it_takes_alone() -> None:
    device = divided(SimulatedDevice(0, QUIET), 32, 0)
    assert seconds_of(device, Stage.ENCODE) == [pytest.approx(device.encode_s(8, 32))]
    assert seconds_of(device, Stage.PREFILL) == [pytest.approx(device.prefill_s(8, NUM_SMS))]


def test_disjoint_parts_do_not_slow_each_other_down() -> None:
    device = divided(SimulatedDevice(0, QUIET), 32, 32)
    encode_s, prefill_s = seconds_of(device, Stage.ENCODE, Stage.PREFILL)
    assert encode_s == pytest.approx(device.encode_s(8, 32))
    assert prefill_s == pytest.approx(device.prefill_s(8, NUM_SMS - 32))


def test_crowding_slows_both_down_while_both_run() -> None:
    device = divided(SimulatedDevice(0, Model(noise=0, crowding=0.1, switch_s=0)), 64, 64)
    encode_s, prefill_s = seconds_of(device, Stage.ENCODE, Stage.PREFILL)
    alone_s = device.encode_s(8, 64)
    assert encode_s == pytest.approx(1.1 * alone_s)
    assert prefill_s == pytest.approx(device.prefill_s(8, 68) + 0.1 * alone_s)


def test_time_slices_give_a_large_batch_half_of_what_is_shared() -> None:
    device = SimulatedDevice(0, Model(noise=0, crowding=0, sharing=Sharing.SLICES))
    encode_s, prefill_s = seconds_of(device, Stage.ENCODE, Stage.PREFILL)
    assert encode_s == pytest.approx(device.encode_s(8, NUM_SMS // 2), rel=0.01)
    assert device.prefill_s(8, NUM_SMS) < prefill_s < 2 * device.prefill_s(8, NUM_SMS)


def test_time_slices_are_enough_for_a_small_batch() -> None:
    device = SimulatedDevice(0, Model(noise=0, crowding=0, sharing=Sharing.SLICES))
    begin_ns = device.now_ns()
    device.prefill(8)
    forward = device.encode(1)
    while not forward():
        device.wait(0.01)
    assert (device.now_ns() - begin_ns) / NS_PER_S == pytest.approx(device.encode_s(1, NUM_SMS))


def test_kernels_in_order_wait_for_those_of_prefill() -> None:
    shared = SimulatedDevice(0, Model(noise=0, crowding=0, sharing=Sharing.ORDER))
    in_order_s = seconds_of(shared, Stage.ENCODE, Stage.PREFILL, size=32)[0]
    shared.prefer_encode(True)
    preferred_s = seconds_of(shared, Stage.ENCODE, Stage.PREFILL, size=32)[0]
    alone_s = shared.encode_s(32, NUM_SMS)
    assert alone_s < preferred_s < in_order_s
    shared.prefer_encode(False)
    assert seconds_of(shared, Stage.ENCODE, Stage.PREFILL, size=32)[0] == pytest.approx(in_order_s)


def test_a_step_that_began_keeps_its_part() -> None:
    device = divided(SimulatedDevice(0, Model(noise=0, sharing=Sharing.SLICES)), 0, 0)
    begin_ns = device.now_ns()
    step = device.prefill(8)
    divided(device, 64, 64)
    forward = device.encode(8)
    while not step():
        device.wait(0.001)
        if forward():
            break
    late_s = (device.now_ns() - begin_ns) / NS_PER_S
    assert late_s > 1.3 * device.encode_s(8, 64)


def test_a_switch_takes_the_host_time() -> None:
    device = SimulatedDevice(0)
    device.confine(Stage.PREFILL, 8)
    assert device.now_ns() == round(Model().switch_s * NS_PER_S)
    device.close()


def test_one_piece_of_work_at_a_time() -> None:
    device = SimulatedDevice(0)
    device.encode(1)
    with pytest.raises(AssertionError, match="one encode at a time"):
        device.encode(1)


def test_same_seed_same_noise() -> None:
    first, again, other = (seconds_of(SimulatedDevice(seed), Stage.ENCODE) for seed in (1, 1, 2))
    assert first == again != other


def runs_of(sharing: Sharing) -> tuple[Device, list[Runs]]:
    device = SimulatedDevice(0, Model(sharing=sharing))
    return device, list(gpu_steps.surface(device))


@pytest.fixture(scope="module")
def results() -> dict[Sharing, Result]:
    """Every case on the same seconds, under both assumptions on shared SMs."""
    found = {}
    for sharing in EQUAL:
        device, runs = runs_of(sharing)
        rows = gpu_steps.rows(device, runs, 6.0, lambda _: None)
        found[sharing] = {(row.case, row.step): row for row in rows}
    return found


def attained(row: Row) -> float:
    assert row.forwards_in_target is not None
    return row.forwards_in_target


def test_a_profile_of_noisy_runs_gives_the_table_at_least_four_distinct_rows() -> None:
    device, runs = runs_of(Sharing.ORDER)
    assert {len(each.seconds) for each in runs} == {sweep.NUM_RUNS}
    table = gpu_steps.setting(runs, device.item_tokens).table
    assert all(row.met for row in table.rows)
    assert len({row.units for row in table.rows}) >= 4
    assert table.rows[0].units == device.layout.granule


def test_dynamic_leaves_prefill_more_than_a_static_split(results: dict[Sharing, Result]) -> None:
    for rows in results.values():
        for step in gpu_steps.STEP_CHUNKS:
            dynamic = rows["dynamic", step].prefill_share
            assert dynamic > rows["static, half", step].prefill_share + 0.08
            assert dynamic > rows["static, most", step].prefill_share + 0.1


def test_without_a_rule_encode_is_stuck_only_where_kernels_queue(
    results: dict[Sharing, Result],
) -> None:
    in_slices, in_order = (attained(results[each]["none", "fine"]) for each in EQUAL)
    assert in_slices > 0.8
    assert in_order == 0


def test_a_gate_is_better_where_steps_are_fine(results: dict[Sharing, Result]) -> None:
    """Both are bound by what SMs compute: a partition makes none, and a gate has no short notice
    that leaves an encode with few SMs, and those not free.
    """
    for rows in results.values():
        gate, dynamic = rows["gate", "fine"], rows["dynamic", "fine"]
        assert attained(gate) > 0.95 > attained(dynamic)
        assert gate.prefill_share > dynamic.prefill_share


def test_a_gate_is_worse_where_steps_are_coarse_and_kernels_queue(
    results: dict[Sharing, Result],
) -> None:
    rows = results[Sharing.ORDER]
    assert attained(rows["dynamic", "coarse"]) > attained(rows["gate", "coarse"]) + 0.1


def test_a_coarse_step_makes_encodes_late(results: dict[Sharing, Result]) -> None:
    for rows in results.values():
        fine, coarse = (rows["dynamic", step] for step in ("fine", "coarse"))
        assert attained(coarse) < attained(fine)


def test_a_gate_pays_for_notice_with_the_whole_device() -> None:
    """Of 20 ms, longer than a step: then dynamic keeps its promise as well, and is cheaper."""
    device, runs = runs_of(Sharing.ORDER)
    setting = dataclasses.replace(
        gpu_steps.setting(runs, device.item_tokens), steps={"fine": gpu_steps.STEP_CHUNKS["fine"]}
    )
    trace = contention.draw(setting, random.Random(0), 5.0, notice_s=0.02)
    rows = {row.case: row for row in contention.compare(device, setting, trace, lambda _: None)}
    assert attained(rows["gate"]) > 0.95
    assert attained(rows["dynamic"]) > 0.95
    assert rows["dynamic"].prefill_share > rows["gate"].prefill_share + 0.03


def test_wait_ends_when_work_does_and_not_before_without_any() -> None:
    device = SimulatedDevice(0, QUIET)
    device.wait(1.0)
    assert device.now_ns() == NS_PER_S
