from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from easerve.config import GIB, MIB, ConfigError, Deployment, build
from easerve.engines.partition.green import LEVELS
from easerve.engines.vllm import memory
from easerve.engines.vllm.memory import CPU_KV_CACHE_BYTES, Row, check, detect_host_bytes, gib, plan
from easerve.engines.vllm.models import CAPABILITIES, ModelInfo
from easerve.types import WorkerId

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


@pytest.fixture(autouse=True)
def host_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with room for everything."""
    with monkeypatch.context() as patch:
        patch.setattr(memory, "detect_host_bytes", lambda: 1 << 50)
        yield


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "detect_gpu_bytes", lambda: None)


def test_a_34b_model_fits_on_two_48_gb_gpus() -> None:
    rows = rows_of(on_gpus(2))
    share = int(GPU * 0.9)  # 43.2 GiB
    kv_cache = share - 32 * GIB - ACTIVATIONS  # 9.7 GiB on each GPU
    assert rows["decode-0"] == Row(
        WorkerId("decode-0"),
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


# Encode and local prefill on one GPU ----------------------------------------------------------


EMBEDDINGS = GIB  # engine.embedding_cache


def beside(local: dict[str, Any], encode: dict[str, Any], **content: Any) -> Deployment:
    return on_gpus(2, encode=encode, local_prefill=local, **content)


def test_a_gpu_is_divided_by_what_encode_needs_and_local_prefill_gets_the_rest() -> None:
    """LLaVA-NeXT 34B on 48 GB: two encoders, and over both GPUs one local engine."""
    rows = rows_of(beside({"tensor_parallel_size": 2}, {"replicas": 2}))
    encoder, local = rows["encode-0"], rows["local-prefill-0"]
    assert rows["encode-1"] == replace(encoder, worker_id=WorkerId("encode-1"), devices=(1,))
    assert (encoder.embeddings, encoder.share) == (GIB // 2, 0.06)  # 1.1 * 2.5 of 48 is 0.057
    kv_cache = int(0.84 * GPU) - 32 * GIB - ACTIVATIONS - EMBEDDINGS
    assert local == Row(
        WorkerId("local-prefill-0"),
        devices=(0, 1),
        weights=32 * GIB,
        activations=ACTIVATIONS,
        kv_cache=kv_cache,  # 5.8 GiB
        kv_tokens=2 * kv_cache // KV_BYTES,
        available=int(0.84 * GPU),
        device_bytes=GPU,
        share=0.84,
        embeddings=EMBEDDINGS,
        beside=(WorkerId("encode-0"), WorkerId("encode-1")),
    )
    check(list(rows.values()))


def test_an_encoder_on_two_gpus_takes_half_of_itself_on_each() -> None:
    large = replace(INFO, encoder_bytes=20 * GIB, language_bytes=14 * GIB)
    rows = rows_of(beside({}, {"tensor_parallel_size": 2}), large)
    assert rows["encode-0"].weights == 10 * GIB
    assert rows["encode-0"].share == 0.28  # 1.1 * 12 of 48 is 0.275
    assert [rows[f"local-prefill-{i}"].share for i in range(2)] == [0.62, 0.62]
    check(list(rows.values()))


@pytest.mark.parametrize(
    ("driver", "num_streams"),
    [
        ("auto", len(LEVELS) + 2),
        ("green-context", len(LEVELS) + 2),
        ("mps-static", 1),
        ("priority", 1),
        ("gate", 1),
    ],
)
def test_engines_with_parts_of_a_gpu_keep_activations_for_every_one(
    driver: str, num_streams: int
) -> None:
    """The streams of the parts, and the one that an engine has without a part."""
    small = replace(INFO, language_bytes=4 * GIB)
    undivided, divided = (
        rows_of(beside({}, {}, **more), small) for more in ({}, {"partition": {"driver": driver}})
    )
    for worker_id in ("encode-0", "local-prefill-0"):
        times = divided[worker_id].activations / undivided[worker_id].activations
        assert times == num_streams
    assert divided["prefill-0"].activations == undivided["prefill-0"].activations


def test_a_local_engine_leaves_others_on_its_gpu_what_they_were_given() -> None:
    small = replace(INFO, language_bytes=4 * GIB)
    decode = {"devices": [[0]], "gpu_memory_utilization": 0.3}
    made = on_gpus(1, encode={"devices": [[0]]}, local_prefill={}, decode=decode)
    rows = rows_of(made, small)
    assert rows["local-prefill-0"].share == 0.54
    check(list(rows.values()))


def test_shares_that_are_given_are_taken_and_the_kv_cache_is_what_is_left() -> None:
    given = {"gpu_memory_utilization": 0.1}
    local = {"gpu_memory_utilization": 0.75, "tensor_parallel_size": 2}
    rows = rows_of(beside(local, {"replicas": 2, **given}))
    assert (rows["encode-0"].share, rows["local-prefill-0"].share) == (0.1, 0.75)
    left = int(0.75 * GPU) - 32 * GIB - ACTIVATIONS - EMBEDDINGS
    assert rows["local-prefill-0"].kv_cache == left
    check(list(rows.values()))


@pytest.mark.parametrize(("asked", "fits"), [("5GiB", True), ("6GiB", False)])
def test_a_kv_cache_beside_an_encoder_may_be_asked_for(asked: str, fits: bool) -> None:
    local = {"tensor_parallel_size": 2, "kv_cache_memory": asked}
    rows = plan(beside(local, {"replicas": 2}), INFO)
    if fits:
        check(rows)
    else:
        with pytest.raises(ConfigError, match=r"leave 5\.82 GiB for a KV cache of 6\.00 GiB; rai"):
            check(rows)


def test_a_local_engine_that_does_not_fit_is_an_error_with_every_number() -> None:
    with pytest.raises(ConfigError) as error:
        check(plan(beside({}, {"replicas": 2}), INFO))
    assert str(error.value) == (
        "local-prefill-0 beside encode-0: a GPU has 48.00 GiB; encode-0 gets 0.06 of it (weights "
        "0.50 GiB, activations 1.50 GiB and embeddings 0.50 GiB), local-prefill-0 0.84, of which "
        "weights 64.00 GiB, activations 1.50 GiB and embeddings 1.00 GiB leave -26.18 GiB for a KV "
        "cache; raise local_prefill.tensor_parallel_size, so that more GPUs hold the weights"
    )


def test_given_shares_of_encode_and_local_prefill_are_at_most_all_of_a_gpu() -> None:
    small = replace(INFO, language_bytes=4 * GIB)
    share = {"gpu_memory_utilization": 0.6}
    with pytest.raises(
        ConfigError, match=r"encode-0 0\.6 \+ local-prefill-0 0\.6 = 1\.2 is over 1"
    ):
        check(plan(beside(dict(share), dict(share)), small))


COMPUTED: dict[str, Any] = {}
GIVEN = {"gpu_memory_utilization": 0.4}
SHARES = "encode.gpu_memory_utilization and local_prefill.gpu_memory_utilization"


@pytest.mark.parametrize(
    ("shares", "local", "to_set"),
    [
        (COMPUTED, {}, f"local_prefill.kv_cache_memory and {SHARES}"),
        (COMPUTED, {"kv_cache_memory": "1GiB"}, SHARES),
        (GIVEN, {}, "local_prefill.kv_cache_memory"),
        (GIVEN, {"kv_cache_memory": "1GiB"}, None),
    ],
)
@pytest.mark.usefixtures("no_driver")
def test_what_is_not_known_of_model_or_gpu_has_to_be_given(
    shares: dict[str, Any], local: dict[str, Any], to_set: str | None
) -> None:
    content = {"device": "cuda", "encode": shares, "local_prefill": {**shares, **local}}
    unknown_gpu, unknown_model = deployment(**content), deployment(gpu_memory="48GiB", **content)
    if to_set is None:
        for made, info in ((unknown_gpu, INFO), (unknown_model, ModelInfo())):
            rows = rows_of(made, info)
            assert rows["local-prefill-0"].kv_cache == GIB
            check(list(rows.values()))
        return
    with pytest.raises(
        ConfigError, match=r"memory of a GPU is not known.*; set gpu_memory, or "
    ) as e:
        plan(unknown_gpu, INFO)
    assert str(e.value).endswith(f", or {to_set}")
    with pytest.raises(ConfigError, match=r"the weights of 'm' are not on this machine") as e:
        plan(unknown_model, ModelInfo())
    assert str(e.value).endswith(f", or set {to_set}")


# Unknowns -------------------------------------------------------------------------------------


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


# The memory of a CPU ----------------------------------------------------------------------------


@pytest.mark.parametrize(("available", "fits"), [(257, True), (256, False)])
def test_engines_of_a_cpu_have_to_fit_in_its_memory_together(
    monkeypatch: pytest.MonkeyPatch, available: int, fits: bool
) -> None:
    """An encoder of half a GiB, three language models of 64 and 21 GiB of KV caches each."""
    monkeypatch.setattr(memory, "detect_host_bytes", lambda: available * GIB)
    kv_cache = {"kv_cache_memory": "21.25GiB"}
    rows = plan(deployment(local_prefill=kv_cache, prefill=kv_cache, decode=kv_cache), INFO)
    if fits:
        check(rows)
    else:
        with pytest.raises(ConfigError) as error:
            check(rows)
        assert str(error.value) == (
            "weights and KV caches encode-0 0.50 GiB + local-prefill-0 85.25 GiB + prefill-0 "
            "85.25 GiB + decode-0 85.25 GiB = 256.25 GiB, but this machine has 256.00 GiB of "
            "memory available; lower kv_cache_memory or replicas, or serve a smaller model"
        )


def test_gpu_engines_are_not_weighed_against_the_machines_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "detect_host_bytes", lambda: 0)
    check(plan(on_gpus(2), INFO))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB available, no limits; its control groups are in ``cgroup``."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 << 20} kB\n")
    (tmp_path / "own").write_text("1:name=systemd:/x\n0::/user/mine\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    return tmp_path


def limit(group: Path, maximum: str, current: int, inactive_file: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def test_without_control_groups_the_machine_says_what_is_available(machine: Path) -> None:
    assert detect_host_bytes() == 8 * GIB
    (machine / "meminfo").unlink()
    assert detect_host_bytes() is None


@pytest.mark.parametrize("group", ["", "user", "user/mine"])
def test_the_limit_of_each_control_group_above_counts_without_what_is_only_cached(
    machine: Path, group: str
) -> None:
    limit(machine / "cgroup/user/mine", "max", 7 * GIB)
    limit(machine / "cgroup" / group, str(4 * GIB), 3 * GIB, inactive_file=GIB)
    assert detect_host_bytes() == 2 * GIB
    limit(machine / "cgroup" / group, str(64 * GIB), 3 * GIB)
    assert detect_host_bytes() == 8 * GIB
    limit(machine / "cgroup" / group, str(GIB), 3 * GIB)
    assert detect_host_bytes() == 0


def test_a_row_becomes_json() -> None:
    row = rows_of(on_gpus())["prefill-0"].as_dict()
    assert row["worker_id"] == "prefill-0"
    assert row["kv_tokens"] == 84_759


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0.00 GiB"), (3 * GIB // 2, "1.50 GiB")])
def test_sizes_are_in_gib(num_bytes: int, text: str) -> None:
    assert gib(num_bytes) == text
