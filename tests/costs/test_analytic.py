"""The roofline, against its formulas by hand and against what was measured."""

import pytest

from easerve.costs import hardware, models
from easerve.costs.analytic import Roofline
from easerve.costs.base import Forward, Media
from easerve.costs.build import Knobs, costs
from easerve.types import Modality

NAMES = ("llava-v1.6-34b", "qwen2.5-vl-32b", "ultravox-v0.6-27b")
TINY = models.read("tiny-llava")
ADA, A100, CPU = map(hardware.read, ("rtx6000-ada", "a100-80", "cpu-2-cores"))


def test_a_product_is_computed_or_moved() -> None:
    product = Roofline(ADA, 2, 0.5).products([(3, (4096, 8192))])
    weights, moved = 4096 * 8192, 4096 + 8192
    computing = 2 * weights / (0.5 * 364.2e12)
    moving = 2 / (0.8 * 960e9)
    assert product.seconds(1) == pytest.approx(3 * (weights + moved) * moving)
    assert product.seconds(4000) == pytest.approx(3 * 4000 * computing)
    assert product.computing(10) == pytest.approx(3 * 10 * computing)


@pytest.mark.parametrize(("shape", "rows"), [((1, 64), 1000), ((64, 64), 1)])
def test_products_that_are_always_bound_by_one(shape: tuple[int, int], rows: int) -> None:
    slow_memory = Roofline(CPU if shape[0] > 1 else ADA, 2, 1.0)
    product = slow_memory.products([(1, shape)])
    assert product.seconds(2 * rows) == pytest.approx(
        2 * product.seconds(rows), rel=0.02 if rows > 1 else 1
    )


def test_attention() -> None:
    roofline = Roofline(A100, 2, 0.9)
    assert roofline.causal(128, 8)(32, 1000) == pytest.approx(
        4 * 128 * 32 * 500_500 / (312e12 * A100.efficiency.attention.si)
    )
    assert roofline.generation(128, 8)(8, 1000) == pytest.approx(
        8 * 1000 * 2 * 128 * 2 / (2039e9 * 0.72)
    )
    assert roofline.unmasked(64)(16, 577) == pytest.approx(4 * 64 * 16 * 577**2 / (312e12 * 0.42))


def test_all_reduce() -> None:
    curve = Roofline(A100, 2, 0.9).all_reduce(4)
    assert curve(1 << 20) == pytest.approx(5.5e-6 + 1.5 * (1 << 20) / 216.7e9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("device", "tp"), [(ADA, 2), (A100, 1), (A100, 2)])
def test_it_is_near_what_was_measured(name: str, device: hardware.Hardware, tp: int) -> None:
    """Within a third, for the steps that serving large models is made of."""
    model = models.read(name)
    measured, roofline = (costs(model, device, tp, x) for x in ("measured", "roofline"))
    for step in (
        Forward(2048, 2048 * 2049 // 2, 1),
        Forward(512, 512 * 3000, 1, 16, 40_000),
        Forward(num_decodes=1, decode_context=3000),
        Forward(num_decodes=32, decode_context=32 * 2000),
    ):
        assert roofline.forward(step) == pytest.approx(measured.forward(step), rel=0.33)


def test_a_cpu_has_a_roofline_alone() -> None:
    found = costs(TINY, CPU, 1, "roofline", Knobs(step_overhead_s=0))
    assert 0 < found.encode([Media(Modality.IMAGE, 25, 1, 26)]) < 0.1
    assert 0 < found.decode_step(1, 40) < found.prefill(400)
    assert found.prefill(400, 0.5) > found.prefill(400)
