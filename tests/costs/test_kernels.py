"""Tables of measured kernels: what is read, what lies between, how far off that is."""

import gzip
import time
from pathlib import Path

import pytest

from easerve.costs import hardware
from easerve.costs.held_out import held_out
from easerve.costs.kernels import (
    CUSTOM_BYTES,
    FOLDER,
    Curve,
    Plane,
    Products,
    Table,
    all_reduce,
    attention_points,
    causal,
    cold_points,
    encoder_points,
    generation,
    least_per_x,
    table,
    total,
    unmasked,
)

DEVICES = {"l40s": "l40s", "a100": "a100-80", "h100": "h100-sxm", "h200": "h200-sxm"}


def known(device: str, kind: str) -> Table:
    found = table(device, kind)
    assert found is not None
    return found


def test_a_curve() -> None:
    curve = Curve([(4, 8.0), (2, 6.0)])
    assert [curve(x) for x in (1, 2, 3, 4, 8)] == [6, 6, 7, 8, 16]
    assert list(curve.points()) == [(2, 6), (4, 8)]
    assert least_per_x(curve) == 2


@pytest.mark.parametrize("points", [[], [(0, 1.0)]])
def test_what_is_no_curve(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="a curve needs a point above 0"):
        Curve(points)


def test_curves_add_up() -> None:
    both = total([(2, Curve([(1, 1.0), (3, 3.0)])), (1, Curve([(2, 5.0)]))])
    assert [both(x) for x in (1, 2, 3)] == [7, 9, 13.5]


def test_a_plane_is_linear_in_heads_and_in_work() -> None:
    plane = Plane({1: {1: 1.0, 3: 3.0}, 3: {1: 10.0, 3: 30.0}}, lambda length: length**2)
    assert plane(2, 1) == 2
    assert plane(1, 2) == pytest.approx(1 + 9 * 3 / 8)
    assert plane(0.5, 0.5) == 1  # nothing is shorter than the least point
    assert plane(6, 1) == 6
    assert plane(1, 6) == pytest.approx(10 * 36 / 9)


def test_a_plane_with_holes() -> None:
    """The largest batches were not measured at the greatest lengths."""
    plane = Plane({1: {1: 1.0, 4: 4.0}, 2: {1: 2.0}}, float)
    assert plane(4, 2) == 8


@pytest.mark.parametrize("device", DEVICES)
def test_tables_say_where_they_are_from(device: str) -> None:
    for path in FOLDER.glob(f"{device}-*.csv.gz"):
        head = Table(path).head
        assert "package: aiconfigurator-core 0.12.0" in head
        assert any(line.startswith("source: ") and "NVIDIA" in line for line in head)
        assert any(line.startswith("licence: Apache-2.0") for line in head)


def test_an_a100_has_no_encoder_attention() -> None:
    assert table("a100", "encoder") is None
    assert all(table(device, "encoder") for device in DEVICES if device != "a100")


def test_a_known_point() -> None:
    """3073 rows times 8192 x 8192 on an L40S are 1.95 ms."""
    row = known("l40s", "gemm").row(("8192", "8192"))
    assert row[3073] == pytest.approx(1.95e-3, rel=0.01)


def test_messages_are_in_bytes() -> None:
    """The package counts elements; an L40S sends no more over PCIe 4.0 x16 than goes through."""
    row = known("l40s", "allreduce").row(("nccl", "2"))
    assert 18e9 < (1 << 29) / row[1 << 29] < 31.5e9


def test_products_of_measured_shapes_are_as_measured() -> None:
    products = Products(known("l40s", "gemm"))
    curve, measured = products.curve((7168, 3584)), products.measured((7168, 3584))
    assert measured is not None
    assert curve.xs == measured.xs
    assert curve.ys == pytest.approx(measured.ys)


def test_products_between_and_beyond() -> None:
    products = Products(known("h100", "gemm"))
    below, between, above = (products.curve((7168, n))(2048) for n in (16384, 20480, 51200))
    assert between == pytest.approx(below + (above - below) * 4096 / 34816)
    assert products.curve((5376, 131072))(64) == pytest.approx(
        2 * products.curve((5376, 65536))(64)
    )
    assert products.curve((100, 256))(1) == products.curve((256, 256))(1)
    assert products.curve((65536, 65536))(1) > products.curve((65536, 51200))(1)


def test_heads_of_many_sequences_count_as_of_one() -> None:
    context = known("l40s", "context")
    points = attention_points(context, 128, 8, by_kv=False)
    assert 4 * 32 in points[2048]
    assert not causal(context, 96, 8)
    assert attention_points(context, 128, 100, by_kv=False)  # the nearest there is
    assert 1 in points[2048]  # of other ratios of heads, where these have no fewer


def test_a_kv_cache_is_not_in_the_devices_cache() -> None:
    """67 MB of KV cache take 37 us where they stay in the L2 of an L40S; in a model they do not."""
    table = known("l40s", "generation")
    warm = attention_points(table, 128, 8, by_kv=True)[1024][128]
    cold = cold_points(table, 128, 8, 96e6)[1024][128]
    assert warm == pytest.approx(37e-6, rel=0.05)
    assert 864e9 > 67e6 / cold > 500e9
    assert generation(table, 128, 8, cache_bytes=1e12) is None
    scaled, plane = generation(table, 128, 8, 96e6, 0.5), generation(table, 128, 8, 96e6)
    assert scaled
    assert plane
    assert scaled(128, 1024) == pytest.approx(plane(128, 1024) / 2)


def test_attention_of_an_encoder() -> None:
    encoder = known("l40s", "encoder")
    plane = unmasked(encoder, 64)
    assert plane
    assert plane(16 * 8, 577) == pytest.approx(encoder_points(encoder, 64)[576][16 * 8], rel=0.02)
    assert unmasked(encoder, 128) is None


def test_all_reduce_is_vllms_own_for_small_messages() -> None:
    table = known("l40s", "allreduce")
    own, nccl = all_reduce(table, 2, custom=True), all_reduce(table, 2, custom=False)
    assert own
    assert nccl
    assert own(4096) < nccl(4096)
    assert own(CUSTOM_BYTES) == nccl(CUSTOM_BYTES)
    assert all_reduce(table, 3, custom=False) is None


def test_a_table_is_read_fast_and_once() -> None:
    begun = time.perf_counter()
    Products(Table(FOLDER / "l40s-gemm.csv.gz")).curve((7168, 20480))
    assert time.perf_counter() - begun < 0.15
    assert known("l40s", "gemm") is known("l40s", "gemm")


def test_files_hold_no_time_of_their_making() -> None:
    for path in FOLDER.glob("*.gz"):
        assert path.read_bytes()[4:8] == bytes(4)
        assert gzip.decompress(path.read_bytes()).isascii()
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1 << 20


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_points_that_are_left_out_are_found_again(device: str) -> None:
    """The bounds are those of the worst device, the L40S, with a little more."""
    for errors in held_out(hardware.read(DEVICES[device])):
        assert errors.num > 100
        assert errors.median < 0.10, errors
        assert errors.p95 < 0.35, errors
        assert abs(errors.bias) < 0.06, errors


def test_nothing_can_be_left_out_of_nothing() -> None:
    with pytest.raises(ValueError, match="no measured kernels"):
        held_out(hardware.read("cpu-2-cores"))


def test_a_row_without_a_measurement(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(b"# what\n# keys: n,k\nn,k,1,2\n3,4,,5\n"))
    found = Table(path)
    assert list(found) == [("3", "4")]
    assert found.row(("3", "4")) == {2: pytest.approx(5e-6)}
