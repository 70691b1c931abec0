import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easerve.goodput import Slo
from easerve.search.bottleneck import Engines, Lacking, Site, engines
from easerve.search.capacity import Row, Table
from easerve.search.space import Allocation
from easerve.types import Stage

E, P, D = Stage.ENCODE, Stage.PREFILL, Stage.DECODE
ROWS = (
    Row(E, 1, 1, 5.0, 0.2),
    Row(E, 1, 8, 10.0, 0.8),
    Row(E, 1, 64, 12.0, 5.0),
    Row(P, 1, 1, 1.0, 1.0),
    Row(P, 2, 1, 1.5, 0.7),
    Row(D, 2, 1, 0.25, 0.04),
    Row(D, 2, 16, 2.0, 0.06),
    Row(D, 2, 32, 3.0, 0.08),
)
SITE = Site(Table(ROWS), Slo(ttft_s=4.0, tpot_s=0.07), crowding=0.0)


def allocation(encoders: int = 2, local: dict[str, Any] | None = None, **over: Any) -> Allocation:
    changes = {
        "encode.replicas": encoders,
        "prefill.replicas": 1,
        "prefill.tensor_parallel_size": 2,
        "decode.replicas": 1,
        "decode.tensor_parallel_size": 2,
    }
    changes |= {path.replace("_", ".", 1): value for path, value in over.items()}
    offload = None if local is None else {"local_prefill": local, "partition": None}
    return Allocation("a", changes, offload)


LOCAL = {"tensor_parallel_size": 2}


def test_a_stage_does_what_its_engines_do_within_the_promise() -> None:
    """Encode: half of 4 - 0.7 s; decode: halfway between the steps of 16 and 32."""
    found = engines(allocation(3, prefill_replicas=2, decode_replicas=2), SITE)
    assert (found.encode_per_s, found.remote_per_s, found.local_per_s) == (30.0, 3.0, 0.0)
    assert found.decode_per_s == pytest.approx(5.0)
    assert found.balanced_share == 1.0
    assert found.most_per_s(1.0) == pytest.approx(3.0)


def test_without_a_promise_the_largest_batches_count() -> None:
    found = engines(allocation(), replace(SITE, slo=Slo(latency_s=60.0)))
    assert (found.encode_per_s, found.decode_per_s) == (24.0, 3.0)


def test_knobs_bound_what_is_done_at_once() -> None:
    found = engines(allocation(), SITE, max_items=4, max_seqs=16)
    assert (found.encode_per_s, found.decode_per_s) == (10.0, 2.0)


def test_engines_beside_encoders_are_as_many_as_there_are_groups() -> None:
    assert engines(allocation(4, LOCAL), SITE).local_per_s == 3.0
    assert engines(allocation(4, {}), SITE).local_per_s == 4.0


def test_one_that_has_nothing_said_of_its_devices_has_one() -> None:
    site = replace(SITE, capacities=Table((*ROWS, Row(D, 1, 4, 0.5, 0.05))))
    found = engines(Allocation("a", {"encode.replicas": 1}, {"local_prefill": {}}), site)
    assert (found.remote_per_s, found.local_per_s, found.decode_per_s) == (1.0, 1.0, 0.5)


def test_local_prefill_is_slowed_by_either_of_its_encoders() -> None:
    """An encoder has a call for 0.1 s of a request: at 2 per second, 0.2 s twice as long in every
    second over two encoders, so 1 - 0.8 ** 2 of the time there is half of the speed.
    """
    found = engines(allocation(2, LOCAL), SITE)
    assert found.beside(2.0) == pytest.approx(1.5 * (1 - (1 - 0.8**2) / 2))
    assert found.beside(0.0) == 1.5


def test_cores_that_all_share_bound_what_the_stages_do_together() -> None:
    """0.1 + 1 / 1.5 + 0.4 s of a core for each request."""
    found = engines(allocation(8, prefill_replicas=9, decode_replicas=9), replace(SITE, cores=2))
    assert found.most_per_s(1.0) == pytest.approx(2 / (0.1 + 1 / 1.5 + 0.4))
    assert min(found.stages(1.0, 1.0), key=found.stages(1.0, 1.0).__getitem__) == "machine"


def test_requests_that_ask_nothing_of_encode_are_not_bounded_by_it() -> None:
    rows = [Row(E, 1, 1, math.inf, 0.0), *(row for row in ROWS if row.stage is not E)]
    found = engines(allocation(2, LOCAL), replace(SITE, capacities=Table(tuple(rows))))
    assert found.balanced_share == pytest.approx(0.5)
    assert found.most_per_s(0.5) == pytest.approx(2.5)


def test_nothing_asked_is_no_bound() -> None:
    rows = tuple(Row(stage, 2, 1, math.inf, 0.0) for stage in (P, D))
    site = Site(Table((*rows, Row(E, 1, 1, math.inf, 0.0))), Slo(), cores=2)
    found = engines(allocation(2, LOCAL), site)
    assert found.balanced_share == 1.0
    assert found.most_per_s(1.0) == math.inf


@pytest.mark.parametrize(
    ("slo", "over", "why"),
    [
        (Slo(ttft_s=0.5), {}, "prefill on 2: no prompt is done within the TTFT promise"),
        (Slo(ttft_s=0.8), {}, "encode: no batch is done in 0.05 s, half of what"),
        (Slo(tpot_s=0.03), {}, "decode on 2: no step is as short as the TPOT promise"),
        (Slo(), {"decode_tensor_parallel_size": 4}, "decode on 4: nothing is known of it"),
        (Slo(), {"prefill_tensor_parallel_size": 4}, "prefill on 4: nothing is known of it"),
        (Slo(ttft_s=0.8), {"local": {}}, "prefill on 1: no prompt"),
    ],
)
def test_what_a_stage_lacks_is_said(slo: Slo, over: dict[str, Any], why: str) -> None:
    site = replace(SITE, slo=slo)
    if "local" in over:  # of two prefill engines the one beside encoders is too slow
        site = replace(site, capacities=Table((Row(E, 1, 1, 5.0, 0.01), *ROWS)))
    with pytest.raises(Lacking, match=why):
        engines(allocation(**over), site)


RATES = st.floats(0.1, 20)
FOUND = st.builds(
    Engines,
    RATES,
    st.floats(0, 1),
    RATES,
    RATES,
    RATES,
    st.integers(1, 4),
    st.floats(1, 3),
    st.just(math.inf) | RATES,
)
SHARES = st.floats(0, 1)


@given(FOUND, SHARES)
def test_the_highest_rate_is_that_of_a_scan(found: Engines, share: float) -> None:
    """What is kept up with is kept up with below, so that halving is right."""
    most = found.most_per_s(share)
    for step in range(1, 60):
        rate = most * step / 40
        keeps_up = min(found.stages(rate, share).values()) >= rate
        assert keeps_up is (step <= 40) or math.isclose(rate, most, rel_tol=1e-6)


@given(FOUND)
def test_no_share_does_more_than_both_sides_undisturbed(found: Engines) -> None:
    most = max(found.most_per_s(step / 20) for step in range(21))
    assert most <= found.remote_per_s + found.local_per_s + 1e-6
    assert most <= min(found.encode_per_s, found.decode_per_s, found.machine_per_s) + 1e-6


@given(FOUND)
def test_the_balanced_share_is_the_best_where_encoders_have_room(found: Engines) -> None:
    idle = replace(found, encode_per_s=1e6)
    best = max(idle.most_per_s(step / 40) for step in range(41))
    assert idle.most_per_s(idle.balanced_share) >= best * (1 - 1e-6)


@given(FOUND, SHARES, st.floats(1, 2))
def test_more_of_anything_never_does_less(found: Engines, share: float, more: float) -> None:
    least = found.most_per_s(share) * (1 - 1e-6)
    for name in ("encode_per_s", "remote_per_s", "local_per_s", "decode_per_s", "machine_per_s"):
        assert replace(found, **{name: getattr(found, name) * more}).most_per_s(share) >= least
