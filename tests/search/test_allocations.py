from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easerve.config import Deployment, build
from easerve.engines.vllm import memory
from easerve.search.allocations import Enumeration, enumerate_
from easerve.search.machine import Machine, of_deployment
from easerve.search.overlay import laid
from easerve.search.space import SHARE, Knob, Space
from easerve.sim import scenario as scenarios
from easerve.sim.checks import check
from easerve.sim.config import EaserveSystem
from tests.search.machines import (
    INFO,
    SCENARIOS,
    Links,
    Sizes,
    made,
    on_gpus,
    scenario_of,
    simulated,
)

ADA = ("llava-34b-rtx6000ada", "qwen2.5-vl-32b-rtx6000ada", "ultravox-27b-rtx6000ada")
PAIRS = tuple((gpu, gpu + 1) for gpu in range(0, 8, 2))
TWO = Sizes(prefill=2, decode=2, beside=2)


def names(found: Enumeration) -> list[str]:
    return [each.name for each in found.allocations]


def why(found: Enumeration, name: str) -> str:
    (text,) = [each.why for each in found.pruned if each.name == name]
    return text


def engines(name: str) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """``e2-p2x3-d4`` -> 2, (3, 2), (1, 4): encoders, then engines and devices of each."""
    parts = [[int(each) for each in part[1:].split("x")] for part in name.split("-")]
    (encoders,), *others = parts
    prefill, decode = ((each[1] if len(each) > 1 else 1, each[0]) for each in others)
    return encoders, prefill, decode


def every_name(num_devices: int, tps: tuple[int, ...] = (1, 2, 4, 8)) -> set[str]:
    """The dumb way."""
    found = set()
    for encoders in range(1, num_devices):
        for p_tp in tps:
            for p in range(1, num_devices):
                for d_tp in tps:
                    for d in range(1, num_devices):
                        if encoders + p * p_tp + d * d_tp <= num_devices:
                            many_p, many_d = (f"x{n}" if n > 1 else "" for n in (p, d))
                            found.add(f"e{encoders}-p{p_tp}{many_p}-d{d_tp}{many_d}")
    return found


# Known answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADA)
def test_eight_cards_of_48_gb_hold_a_model_of_30_billion_in_few_ways(name: str) -> None:
    found = enumerate_(simulated(name))
    assert names(found) == ["e2-p2-d2x2", "e2-p2-d4", "e2-p2x2-d2", "e4-p2-d2"]
    assert why(found, "e2-p4-d2").startswith("prefill on 4: without NVLink it takes ")
    for odd in ("e1-p2-d4", "e3-p2-d2", "e1-p2x2-d2"):
        assert why(found, odd).startswith("leaves 1 device idle: e")
    assert "GB of each device" in why(found, "e1-p1-d2")
    assert found.remote_only == []
    local = {"local_prefill": {"tensor_parallel_size": 2}, "partition": None}
    assert all(each.offload == local for each in found.allocations)
    assert found.allocations[0].changes == {
        "encode.replicas": 2,
        "prefill.replicas": 1,
        "prefill.tensor_parallel_size": 2,
        "decode.replicas": 2,
        "decode.tensor_parallel_size": 2,
    }


def test_all_five_are_there_where_nobody_knows_how_long_prefill_takes() -> None:
    found = enumerate_(made(8, TWO))
    five = ["e2-p2-d2x2", "e2-p2-d4", "e2-p2x2-d2", "e2-p4-d2", "e4-p2-d2"]
    assert sorted(names(found)) == five


def test_on_80_gb_and_nvlink_there_are_many_more_and_devices_are_divided() -> None:
    found = enumerate_(simulated("llava-34b-a100"))
    assert len(found.allocations) == 50
    assert {"e1-p1-d1x6", "e2-p2-d2x2", "e2-p4-d2", "e4-p2-d2"} < set(names(found))
    assert all(dict(each.offload or {})["partition"] == {} for each in found.allocations)


def test_a_card_more_than_twos_need_is_idle_rather_than_an_encoder_without_local_prefill() -> None:
    """e3-p2-d2 has all engines of e2-p2-d2 and more, but for the one beside its encoders."""
    found = enumerate_(made(7, TWO))
    assert "e2-p2-d2" in names(found)
    assert "e3-p2-d2" in names(found)
    assert why(found, "e1-p2-d2") == (
        "leaves 2 devices idle: e1-p2-d2x2 has all its engines and more"
    )
    (three, _) = (each for each in found.remote_only if each.name in ("e3-p2-d2", "e1-p2-d2x2"))
    assert "needs 2" in three.why


def test_idle_devices_may_take_several_encoders_at_once() -> None:
    """One more would leave no local prefill, two more have it."""
    found = enumerate_(made(12, Sizes(prefill=4, decode=4, beside=2)))
    assert why(found, "e2-p4-d4") == "leaves 2 devices idle: e4-p4-d4 has all its engines and more"


def test_where_nothing_fits_beside_an_encoder_all_prefill_is_remote() -> None:
    found = enumerate_(made(4, Sizes(beside=99)))
    assert [each.name for each in found.remote_only] == names(found)
    assert all(each.offload is None for each in found.allocations)
    assert found.remote_only[0].why == "prefill beside encoders on 1: needs 99"


def test_prefill_on_four_stays_where_it_is_faster_or_where_two_do_not_hold_the_model() -> None:
    def seconds(tp: int) -> float:
        return {1: 8.0, 2: 5.0, 4: 4.0, 8: 4.0}[tp]

    faster = enumerate_(made(8, TWO, prefill_s=seconds))
    assert "e2-p4-d2" in names(faster)
    slower = enumerate_(made(8, TWO, prefill_s=float))
    assert why(slower, "e2-p4-d2") == "prefill on 4: without NVLink it takes 4 s, and 2 s on 2"
    assert "e2-p4-d2" in names(enumerate_(made(8, Sizes(4, 2, 2), prefill_s=float)))
    joined = made(8, TWO, prefill_s=float, islands=(tuple(range(8)),))
    assert "e2-p4-d2" in names(enumerate_(joined))


def test_fewer_than_three_devices_are_divided_in_no_way() -> None:
    assert len(enumerate_(made(2))) == 0
    assert names(enumerate_(made(3))) == ["e1-p1-d1"]


# Islands ------------------------------------------------------------------------------------------


def test_groups_are_joined_by_nvlink() -> None:
    found = enumerate_(made(8, TWO, islands=PAIRS))
    assert names(found) == ["e2-p2-d2x2", "e2-p2x2-d2", "e4-p2-d2"]
    assert why(found, "e2-p2-d4") == (
        "prefill on 2 and decode on 4: the islands of NVLink do not hold them: 0-1, 2-3, 4-5, 6-7"
    )


def test_encoders_share_an_island_where_prefill_is_over_them() -> None:
    """Of islands of three each has one device over, which two encoders are on."""
    found = enumerate_(made(6, TWO, islands=((0, 1, 2), (3, 4, 5))))
    assert names(found) == ["e2-p2-d2"]
    assert found.remote_only[0].why == (
        "no island of NVLink has room for 2 encoders with prefill over their devices"
    )


# Invariants ---------------------------------------------------------------------------------------


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    num = draw(st.integers(1, 8))
    powers = st.sampled_from([1, 2, 4])
    sizes = Sizes(draw(powers), draw(powers), draw(powers))
    joins: list[int] = draw(st.lists(st.integers(0, 3), min_size=num, max_size=num))
    islands = tuple(
        tuple(gpu for gpu in range(num) if joins[gpu] == number)
        for number in range(1, 4)
        if joins.count(number) > 1
    )
    prefill_s = draw(st.sampled_from([None, lambda tp: 1 / tp, lambda tp: 1.0]))
    return made(num, sizes, islands=islands, prefill_s=prefill_s, names_devices=True)


@given(machines())
def test_nothing_is_pruned_silently(machine: Machine) -> None:
    found = enumerate_(machine)
    told = Counter([*names(found), *(each.name for each in found.pruned)])
    assert set(told) == every_name(len(machine.devices))
    assert set(told.values()) <= {1}
    assert len(found) == len(told)
    assert all(each.why for each in [*found.pruned, *found.remote_only])


@given(machines())
def test_engines_have_devices_of_their_own_in_one_island(machine: Machine) -> None:
    for each in enumerate_(machine).allocations:
        encoders, prefill, decode = engines(each.name)
        groups: dict[str, list[list[int]]] = {
            stage: each.changes[f"{stage}.devices"] for stage in ("encode", "prefill", "decode")
        }
        assert [len(group) for group in groups["encode"]] == [1] * encoders
        assert [len(group) for group in groups["prefill"]] == [prefill[1]] * prefill[0]
        assert [len(group) for group in groups["decode"]] == [decode[1]] * decode[0]
        used = [gpu for stage in groups.values() for group in stage for gpu in group]
        assert len(used) == len(set(used))
        assert set(used) <= set(machine.devices)
        together = [*groups["prefill"], *groups["decode"]]
        if each.offload is not None:
            tp = each.offload["local_prefill"]["tensor_parallel_size"]
            assert encoders % tp == 0
            flat = [group[0] for group in groups["encode"]]
            together += [flat[begin : begin + tp] for begin in range(0, encoders, tp)]
        for group in together:
            joined = [island for island in machine.islands if set(group) <= set(island)]
            assert joined or not machine.islands or len(group) == 1


def has_all_of(large: str, small: str) -> bool:
    (encoders, *others), (fewer, *before) = engines(large), engines(small)
    return encoders >= fewer and all(
        more[1] == few[1] and more[0] >= few[0] for more, few in zip(others, before, strict=True)
    )


@given(machines())
def test_devices_are_idle_only_where_no_allocation_has_the_same_engines_and_more(
    machine: Machine,
) -> None:
    found = enumerate_(machine)
    kept = {each.name: each for each in found.allocations}
    for each in (each for each in found.pruned if " idle: " in each.why):
        other = each.why.split(": ")[1].split()[0]
        assert other in kept
        assert other != each.name
        assert has_all_of(other, each.name)
    for name, allocation in kept.items():
        larger = [each for each in kept if each != name and has_all_of(each, name)]
        assert not larger or allocation.offload is not None
        assert all(kept[each].offload is None for each in larger)


def holds(islands: list[int], sizes: list[int]) -> bool:
    """The dumb way: every island is tried for every group."""
    if not sizes:
        return True
    size, *others = sizes
    return any(
        holds([*islands[:number], room - size, *islands[number + 1 :]], others)
        for number, room in enumerate(islands)
        if room >= size
    )


@given(machines())
def test_what_is_pruned_for_islands_can_be_placed_in_no_way(machine: Machine) -> None:
    found = enumerate_(machine)
    alone = len(machine.devices) - sum(map(len, machine.islands))
    rooms = [*map(len, machine.islands), *[1] * alone]
    for each in (each for each in found.pruned if "NVLink do not hold" in each.why):
        encoders, (p, p_tp), (d, d_tp) = engines(each.name)
        assert not holds(rooms, [*[p_tp] * p, *[d_tp] * d, *[1] * encoders])


# What comes of them -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted(SCENARIOS.glob("*-[ra][t1]*.yaml")), ids=lambda each: each.stem
)
def test_every_allocation_is_a_section_of_the_scenario(path: Any) -> None:
    scenario = scenario_of(path.stem)
    system = scenario.configs["easerve"].model_dump(exclude_unset=True)
    space = Space(enumerate_(simulated(path.stem)).allocations, [Knob(SHARE, (0.5, 1.0))])
    for configuration in space:
        section = scenarios.laid(system, space.changes(configuration))
        made_of = EaserveSystem.model_validate(section)
        assert made_of.num_gpus == 8
        assert (made_of.local_prefill is None) is (configuration[SHARE] == 1)


def test_a_scenario_with_any_allocation_is_checked() -> None:
    content = scenarios.read_content(SCENARIOS / "llava-34b-rtx6000ada.yaml")
    space = Space(enumerate_(simulated("llava-34b-rtx6000ada")).allocations, [Knob(SHARE, (0.5,))])
    for configuration in space:
        changes = {
            f"systems.easerve.{key}": each for key, each in space.changes(configuration).items()
        }
        changes |= {"experiment": None, "anchors": []}
        check(scenarios.build(scenarios.laid(content, changes), "test"))


FILE: dict[str, Any] = {
    "encode": {"replicas": 1, "devices": [[0]]},
    "local_prefill": {"tensor_parallel_size": 1, "max_num_seqs": 16},
    "partition": {"driver": "gate"},
    "prefill": {"tensor_parallel_size": 4, "devices": [[4, 5, 6, 7]]},
    "policy": {"remote_share": 0.5, "how": "gate"},
}


def deployments(content: dict[str, Any], machine: Machine) -> list[Deployment]:
    space = Space(enumerate_(machine).allocations, [Knob(SHARE, (0.5, 1.0))])
    return [build(laid(content, space.changes(each)), each.allocation) for each in space]


@pytest.mark.parametrize("gpu_memory", ["48GiB", "80GiB", "140GiB"])
@pytest.mark.parametrize("content", [{}, FILE])
def test_every_allocation_is_a_deployment_that_serve_takes(
    content: dict[str, Any], gpu_memory: str
) -> None:
    content = {"model": "acme/m", "device": "cuda", "gpu_memory": gpu_memory, **content}
    machine = of_deployment(on_gpus(**content), info=INFO, driver=Links(8))
    found = deployments(content, machine)
    assert found
    for deployment in found:
        memory.check(memory.plan(deployment, INFO))


def test_on_a_cpu_every_number_of_engines_is_an_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "detect_host_bytes", lambda: 1 << 50)
    content = {"model": "acme/m", "encode": {"cores": [[0]]}, "prefill": {"max_num_seqs": 8}}
    machine = of_deployment(build(content, "test"), info=INFO, max_engines=5)
    found = enumerate_(machine)
    assert set(names(found)) == every_name(5, (1,))
    assert found.pruned == []
    assert found.allocations[0].changes == {
        "encode.cores": None,
        "encode.replicas": 1,
        "prefill.replicas": 1,
        "decode.replicas": 1,
    }
    assert all(each.offload == {"local_prefill": {}} for each in found.allocations)
    assert len(deployments(content, machine)) == 2 * len(found.allocations)


def test_on_a_cpu_memory_prunes(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = INFO.encoder_bytes, INFO.language_bytes
    assert needed[0] is not None
    assert needed[1] is not None
    total = needed[0] + 2 * needed[1] + 2 * memory.CPU_KV_CACHE_BYTES
    monkeypatch.setattr(memory, "detect_host_bytes", lambda: total)
    deployment = build({"model": "acme/m"}, "test")
    found = enumerate_(of_deployment(deployment, info=INFO, max_engines=4))
    assert names(found) == ["e1-p1-d1"]
    assert len(found) == 4
    assert "of memory available" in why(found, "e1-p1x2-d1")
    assert "of memory available" in found.remote_only[0].why
