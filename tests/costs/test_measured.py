"""Costs from measured kernels: what large models take, and how that changes."""

import pytest

from easerve.config import ConfigError
from easerve.costs import hardware, models
from easerve.costs.base import Forward, Media
from easerve.costs.build import Knobs, costs
from easerve.costs.hardware import Hardware
from easerve.costs.layers import LayerCosts
from easerve.costs.measured import uses_custom_all_reduce
from easerve.types import Modality

LLAVA, QWEN, ULTRAVOX = map(models.read, ("llava-v1.6-34b", "qwen2.5-vl-32b", "ultravox-v0.6-27b"))
ADA, L40S, A100 = map(hardware.read, ("rtx6000-ada", "l40s", "a100-80"))
PICTURE = Media(Modality.IMAGE, 1948, 5, 577)


def llava(device: Hardware = L40S, tp: int = 2, **knobs: float) -> LayerCosts:
    return costs(LLAVA, device, tp, "measured", Knobs(**knobs))


def test_prefill_of_llava_on_two_l40s() -> None:
    """About 0.45 s of products, 0.26 s of all-reduce, and the rest: 0.79 s in all."""
    parts = llava().parts(Forward(2972, 2972 * 2973 // 2, 1))
    assert parts.gemm == pytest.approx(0.449, rel=0.02)
    assert parts.all_reduce == pytest.approx(0.257, rel=0.02)
    assert parts.attention == pytest.approx(0.023, rel=0.1)
    assert sum(parts) == pytest.approx(0.786, rel=0.02) == llava().prefill(2972)


def test_more_bandwidth_makes_a_decode_shorter_and_a_prefill_hardly() -> None:
    ada, l40s = llava(ADA), llava(L40S)
    assert 0.90 < ada.decode_step(16, 48_000) / l40s.decode_step(16, 48_000) < 0.93
    assert 0.97 < ada.prefill(2972) / l40s.prefill(2972) < 1


def test_a_decode_reads_all_weights() -> None:
    bytes_per_s = LLAVA.language.weight_bytes / 2 / llava(ADA, step_overhead_s=0).decode_step(1, 1)
    assert 0.7 < bytes_per_s / 960e9 < 0.95


def test_four_devices_on_pcie_are_slower_than_two() -> None:
    assert llava(ADA, 4).prefill(2972) > llava(ADA, 2).prefill(2972)
    assert (
        llava(A100, 4).prefill(2972) < llava(A100, 2).prefill(2972) < llava(A100, 1).prefill(2972)
    )


def test_all_reduce_of_vllm() -> None:
    assert uses_custom_all_reduce(L40S.link, 2)
    assert not uses_custom_all_reduce(L40S.link, 4)
    assert uses_custom_all_reduce(A100.link, 8)
    assert not uses_custom_all_reduce(A100.link, 3)
    alone = L40S.link.model_copy(update={"peer_to_peer": False})
    assert not uses_custom_all_reduce(alone, 2)


@pytest.mark.parametrize("model", [LLAVA, QWEN, ULTRAVOX])
def test_chunks_take_as_long_as_the_whole_or_longer(model: models.ModelSpec) -> None:
    found = costs(model, ADA, 2, "measured", Knobs(step_overhead_s=0))
    num, size, seconds, pairs = 4096, 1024, 0.0, 0
    for done in range(0, num, size):
        now = size * done + size * (size + 1) // 2
        seconds += found.forward(Forward(size, now, int(done + size == num)))
        pairs += now
    assert pairs == num * (num + 1) // 2
    assert 0.99 < seconds / found.prefill(num) < 1.15


def test_prompts_together_take_less_than_alone() -> None:
    alone, pairs = llava().prefill(300), 300 * 301 // 2
    assert alone < llava().forward(Forward(600, 2 * pairs, 2)) < 2 * alone


def test_time_grows_with_the_work() -> None:
    found = llava()
    for steps in (
        [Forward(num_decodes=b, decode_context=b * 1000) for b in (1, 8, 64, 256)],
        [Forward(num_decodes=16, decode_context=16 * c) for c in (10, 500, 2000, 9000)],
        [Forward(n, n * (n + 1) // 2, 1) for n in (128, 512, 2048, 8192)],
        [Forward(512, 512 * c, 1, 8, 8000) for c in (256, 2000, 8000)],
    ):
        times = [found.forward(step) for step in steps]
        assert times == sorted(times)
        assert times[0] < times[-1]


def test_a_window_bounds_attention() -> None:
    """Ultravox: 52 of 62 layers attend to 1024 tokens."""
    model = ULTRAVOX.model_copy(
        update={
            "language": ULTRAVOX.language.model_copy(
                update={"window": None, "num_window_layers": 0}
            )
        }
    )
    windowed, whole = costs(ULTRAVOX, A100, 1), costs(model, A100, 1)
    assert windowed.prefill(900) == pytest.approx(whole.prefill(900))
    assert windowed.decode_step(4, 4 * 900) == pytest.approx(whole.decode_step(4, 4 * 900))
    long, short = Forward(1024, 1024 * 15_000), Forward(1024, 1024 * 1_000)
    assert windowed.parts(long).attention < whole.parts(long).attention / 2
    assert windowed.parts(short).attention == pytest.approx(whole.parts(short).attention, rel=0.3)
    assert windowed.decode_step(8, 8 * 20_000) < whole.decode_step(8, 8 * 20_000)


def test_nothing_takes_no_time() -> None:
    assert llava().forward(Forward()) == 0
    assert llava().encode([]) == 0


def test_a_share_of_the_units() -> None:
    found = llava(ADA, step_overhead_s=0)
    whole, half = (found.parts(Forward(2972, 2972 * 2973 // 2, 1), x) for x in (1.0, 0.5))
    assert 1.9 < half.gemm / whole.gemm <= 2
    assert half.attention == pytest.approx(2 * whole.attention)
    assert half.all_reduce == whole.all_reduce
    assert found.decode_step(8, 24_000, 0.5) == pytest.approx(found.decode_step(8, 24_000))
    assert found.decode_step(8, 24_000, 0.2) > 2 * found.decode_step(8, 24_000)
    assert found.encode([PICTURE], 0.25) > 3 * found.encode([PICTURE])
    shares = [found.prefill(2972, x / 20) for x in range(20, 1, -1)]
    assert shares == sorted(shares)


@pytest.mark.parametrize("share", [0, 1.01, -1])
def test_what_is_no_share(share: float) -> None:
    with pytest.raises(ValueError, match="a share of the units"):
        llava().prefill(10, share)


def test_an_encoder_forward() -> None:
    one, eight = llava(ADA).encode([PICTURE]), llava(ADA).encode([PICTURE] * 8)
    assert one == pytest.approx(0.0147, rel=0.02)
    assert 4 < eight / one < 10
    audio, frames = Media(Modality.AUDIO, 63, 1, 500), Media(Modality.VIDEO, 9568, 8, 4784)
    assert costs(ULTRAVOX, ADA, 2).encode([audio]) < 0.01
    parts = costs(QWEN, ADA, 2).encode_parts([frames])
    assert 0.1 < sum(parts) < 1
    short = Media(Modality.IMAGE, 4, 1, 16)  # less than a window
    assert costs(QWEN, ADA, 2).encode([short]) > 0


def test_attention_that_an_a100_has_no_table_for() -> None:
    """The roofline fills in."""
    parts = llava(A100).encode_parts([PICTURE])
    flops = 23 * 4 * 5 * 577**2 * 1024
    assert parts.attention == pytest.approx(flops / 312e12 / 0.42)


def test_transfers() -> None:
    ada, a100 = llava(ADA), llava(A100)
    setup = 0.002 + 6.5e-6
    assert ada.embedding_transfer(1948) == pytest.approx(setup + 1948 * 14_336 / 20.1e9)
    assert ada.kv_transfer(2972) == pytest.approx(setup + 2972 * 245_760 / 2 / 20.1e9)
    assert a100.kv_transfer(2972) < ada.kv_transfer(2972) / 4
    assert llava(ADA, link_gbytes_per_s=40.2, transfer_setup_s=0).kv_transfer(2972) < setup + 0.01


@pytest.mark.parametrize("part", ["gemm", "attention", "all_reduce"])
def test_scales_act_on_one_part(part: str) -> None:
    step = Forward(2000, 2_000_000, 1, 16, 40_000)
    plain = llava().parts(step)
    knobs = Knobs.model_validate({f"{part}_scale": 1.5})
    scaled = costs(LLAVA, L40S, 2, "measured", knobs).parts(step)
    for name in plain._fields:
        changed = name == part or (part == "gemm" and name == "logits")
        factor = 1.5 if changed else 1
        assert getattr(scaled, name) == pytest.approx(factor * getattr(plain, name))


def test_other_knobs() -> None:
    assert llava(step_overhead_s=0.03).decode_step(1, 10) == pytest.approx(
        llava().decode_step(1, 10) + 0.024
    )
    assert llava(encode_scale=2).encode([PICTURE]) == pytest.approx(2 * llava().encode([PICTURE]))
    assert llava(compute_elasticity=0.2).prefill(2972, 0.5) < 1.3 * llava().prefill(2972)
    assert llava(bandwidth_knee=1).decode_step(1, 10, 0.5) > 1.8 * llava().decode_step(1, 10, 0.5)


def test_models_that_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 3: it must divide 56 heads"):
        llava(tp=3)
    language = LLAVA.language.model_copy(update={"num_kv_heads": 14, "num_heads": 56})
    model = LLAVA.model_copy(update={"language": language})
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 14: .* is known for 1, 2, 4, 8"):
        costs(model, L40S, 14)


def test_what_was_not_measured() -> None:
    with pytest.raises(ConfigError, match="Two cores of an AMD EPYC: no measured kernels"):
        costs(LLAVA, hardware.read("cpu-2-cores"), 1)
    model = LLAVA.language.model_copy(update={"value_bytes": 4})
    with pytest.raises(ConfigError, match="measured kernels are of bfloat16, not of 4 bytes"):
        costs(LLAVA.model_copy(update={"language": model}), L40S, 2)
    heads = LLAVA.language.model_copy(update={"head_dim": 96})
    assert costs(LLAVA.model_copy(update={"language": heads}), L40S, 2).prefill(100) > 0
