from dataclasses import replace
from typing import Any

import pytest

from easerve.config import GIB, MIB, ConfigError, Deployment, build
from easerve.engines.vllm import memory
from easerve.engines.vllm.launch import CPU_KV_CACHE_BYTES
from easerve.engines.vllm.memory import Row, check, gib, plan
from easerve.engines.vllm.models import CAPABILITIES, ModelInfo

# As LLaVA-NeXT 34B: 60 layers, 8 key-value heads of 128, all in 16 bit.
KV_BYTES = 2 * 60 * 8 * 128 * 2
INFO = ModelInfo(
    architecture="LlavaNextForConditionalGeneration",
    model_type="llava_next",
    encoder_bytes=GIB // 2,
    language_bytes=64 * GIB,
    kv_bytes_per_token=KV_BYTES,
)
GPU = 48 * GIB
ACTIVATIONS = 3 * GIB // 2


def deployment(**content: Any) -> Deployment:
    return build({"model": "m", **content}, "test")


def on_gpus(tensor_parallel_size: int = 2, **content: Any) -> Deployment:
    size = {"tensor_parallel_size": tensor_parallel_size}
    stages = {"prefill": dict(size), "decode": dict(size)}
    return deployment(device="cuda", gpu_memory="48GiB", **{**stages, **content})


def rows_of(made: Deployment, info: ModelInfo = INFO) -> dict[str, Row]:
    return {row.worker_id: row for row in plan(made, info)}


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "detect_gpu_bytes", lambda: None)


def test_a_34b_model_fits_on_two_48_gb_gpus() -> None:
    rows = rows_of(on_gpus(2))
    share = int(GPU * 0.9)  # 43.2 GiB
    kv_cache = share - 32 * GIB - ACTIVATIONS  # 9.7 GiB on each GPU
    assert rows["decode-0"] == Row(
        "decode-0",  # type: ignore[arg-type]
        devices=(3, 4),
        weights=32 * GIB,
        activations=ACTIVATIONS,
        kv_cache=kv_cache,
        kv_tokens=2 * kv_cache // KV_BYTES,  # each GPU holds half of every token
        available=share,
        device_bytes=GPU,
        share=0.9,
    )
    assert rows["decode-0"].kv_tokens == 84_759
    assert rows["prefill-0"].devices == (1, 2)
    check(list(rows.values()))


def test_an_encoder_holds_its_weights_and_no_kv_cache() -> None:
    encoder = rows_of(on_gpus())["encode-0"]
    assert (encoder.weights, encoder.kv_cache, encoder.kv_tokens) == (GIB // 2, 0, None)


def test_a_prefill_that_gets_media_holds_the_encoders_weights_too() -> None:
    sparse = CAPABILITIES["LlavaForConditionalGeneration/pixtral"]
    rows = rows_of(on_gpus(), replace(INFO, capability=sparse))
    assert rows["prefill-0"].weights == (64 * GIB + GIB // 2) // 2
    assert rows["decode-0"].weights == 32 * GIB


def test_a_34b_model_does_not_fit_on_one_48_gb_gpu_and_the_error_has_the_numbers() -> None:
    with pytest.raises(ConfigError) as error:
        check(plan(on_gpus(1), INFO))
    assert str(error.value) == (
        "prefill-0: weights 64.00 GiB and activations 1.50 GiB leave no room for a KV cache in "
        "43.20 GiB (0.9 of a GPU of 48.00 GiB); raise tensor_parallel_size or "
        "gpu_memory_utilization"
    )


def test_an_encoder_that_does_not_fit_is_an_error() -> None:
    small = {"gpu_memory_utilization": 0.04}  # 1.92 of 2 GiB
    with pytest.raises(ConfigError, match=r"^encode-0: weights 0\.50 GiB .* in 1\.92 GiB"):
        check(plan(on_gpus(encode=small), INFO))


@pytest.mark.parametrize(("asked", "fits"), [("9.6GiB", True), ("9.8GiB", False)])
def test_a_kv_cache_that_was_asked_for_is_planned_as_asked(asked: str, fits: bool) -> None:
    rows = rows_of(on_gpus(decode={"tensor_parallel_size": 2, "kv_cache_memory": asked}))
    assert rows["decode-0"].kv_cache == int(float(asked.removesuffix("GiB")) * GIB)
    if fits:
        check(list(rows.values()))
    else:
        with pytest.raises(ConfigError, match=r"^decode-0: "):
            check(list(rows.values()))


def test_weights_and_kv_cache_are_twice_as_large_in_float32() -> None:
    half = rows_of(on_gpus(4))["decode-0"]
    full = rows_of(on_gpus(4, engine={"dtype": "float32"}))["decode-0"]
    assert (half.weights, full.weights) == (16 * GIB, 32 * GIB)
    assert full.kv_cache == int(GPU * 0.9) - 32 * GIB - ACTIVATIONS
    assert full.kv_tokens == 4 * full.kv_cache // (2 * KV_BYTES)


@pytest.mark.parametrize(("shares", "fits"), [((0.3, 0.7), True), ((0.3, 0.8), False)])
def test_the_shares_of_one_gpu_are_at_most_all_of_it(
    shares: tuple[float, float], fits: bool
) -> None:
    info = ModelInfo(encoder_bytes=MIB, language_bytes=MIB, kv_bytes_per_token=KV_BYTES)
    encode, prefill = ({"devices": [[1]], "gpu_memory_utilization": share} for share in shares)
    rows = plan(on_gpus(1, encode=encode, prefill=prefill), info)
    if fits:
        check(rows)
    else:
        with pytest.raises(ConfigError) as error:
            check(rows)
        assert str(error.value) == (
            "GPU 1: gpu_memory_utilization encode-0 0.3 + prefill-0 0.8 = 1.1 is over 1"
        )


def test_shares_that_are_a_whole_gpu_on_paper_are_no_more_than_that() -> None:
    shares = (0.05, 0.55, 0.3, 0.1)
    assert sum(shares) > 1, "in binary"
    rows = plan(on_gpus(1), ModelInfo())
    together = [replace(rows[0], devices=(0,), share=share) for share in shares]
    check(together)


def test_a_cpu_engine_has_a_small_kv_cache_and_no_device() -> None:
    rows = rows_of(deployment(prefill={"kv_cache_memory": "1GiB"}))
    assert rows["prefill-0"].kv_cache == GIB
    decode = rows["decode-0"]
    assert decode.kv_cache == CPU_KV_CACHE_BYTES
    assert decode.kv_tokens == CPU_KV_CACHE_BYTES // KV_BYTES
    assert (decode.weights, decode.activations) == (64 * GIB, 0)
    assert (decode.devices, decode.available, decode.device_bytes) == ((), None, None)
    check(list(rows.values()))


def test_of_an_unknown_model_the_plan_says_what_it_knows() -> None:
    decode = rows_of(on_gpus(), ModelInfo())["decode-0"]
    assert (decode.weights, decode.kv_cache, decode.kv_tokens) == (None, None, None)
    assert decode.available == int(GPU * 0.9)
    check(plan(on_gpus(), ModelInfo()))


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver_nothing_is_said_of_what_is_left() -> None:
    rows = plan(deployment(device="cuda"), INFO)
    assert {(row.available, row.device_bytes) for row in rows} == {(None, None)}
    assert [row.kv_cache for row in rows] == [0, None, None]
    check(rows)


def test_the_driver_is_asked_where_the_file_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "detect_gpu_bytes", lambda: 80 * GIB)
    assert rows_of(deployment(device="cuda"))["decode-0"].device_bytes == 80 * GIB
    assert rows_of(on_gpus())["decode-0"].device_bytes == GPU


def test_a_row_becomes_json() -> None:
    row = rows_of(on_gpus())["prefill-0"].as_dict()
    assert row["worker_id"] == "prefill-0"
    assert row["kv_tokens"] == 84_759


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0.00 GiB"), (3 * GIB // 2, "1.50 GiB")])
def test_sizes_are_in_gib(num_bytes: int, text: str) -> None:
    assert gib(num_bytes) == text
