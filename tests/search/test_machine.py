import os

import pytest

from easerve.config import GIB, ConfigError, build
from easerve.engines.vllm import memory
from easerve.engines.vllm.models import ModelInfo
from easerve.search.machine import SPARE_ENGINES, Machine, all_together, of_deployment
from easerve.types import Stage
from tests.search.machines import INFO, Links, made, on_gpus, simulated

ADA, A100 = "llava-34b-rtx6000ada", "llava-34b-a100"
PREFILL, DECODE, ENCODE = Stage.PREFILL, Stage.DECODE, Stage.ENCODE
TINY = ModelInfo(encoder_bytes=1 << 20, language_bytes=1 << 20, kv_bytes_per_token=1 << 10)


def test_degrees_are_powers_of_two_up_to_the_number_of_devices() -> None:
    assert made(8).tps == (1, 2, 4, 8)
    assert made(7).tps == (1, 2, 4)
    assert made(7, shares_cores=True).tps == (1,)
    assert all_together(9, 9, 9, True) is None


# Of a scenario ------------------------------------------------------------------------------------


def test_48_gb_hold_a_34b_model_from_two_devices_on() -> None:
    machine = simulated(ADA)
    assert (len(machine.devices), machine.islands) == (8, ())
    assert machine.refuses(ENCODE, 1, False) is None
    for stage, beside in ((PREFILL, False), (DECODE, False), (PREFILL, True)):
        why = machine.refuses(stage, 1, beside)
        assert why is not None
        assert "GB of each device" in why
        assert machine.refuses(stage, 2, beside) is None


def test_80_gb_hold_it_beside_an_encoder_and_nvlink_joins_them_all() -> None:
    machine = simulated(A100)
    assert machine.islands == (tuple(range(8)),)
    assert machine.refuses(PREFILL, 1, True) is None


def test_a_degree_that_does_not_divide_the_heads_is_refused() -> None:
    why = simulated(ADA, {"num_gpus": 16}).refuses(PREFILL, 16, False)
    assert why == "it does not divide 56 heads, 8 of the KV cache"


def test_a_degree_of_which_nothing_is_known_is_refused() -> None:
    machine = simulated(ADA, {"model": "tiny-llava"})
    why = machine.refuses(DECODE, 2, False)
    assert why is not None
    assert "measured kernels are of bfloat16" in why


def test_a_kv_cache_must_hold_the_largest_request() -> None:
    machine = simulated(ADA, {"systems.easerve.decode.kv_cache_tokens": 3000})
    why = machine.refuses(DECODE, 2, False)
    assert why == "its KV cache of 3000 tokens does not hold a request of 3100"
    assert machine.refuses(PREFILL, 2, False) is None
    local = simulated(ADA, {"systems.easerve.local_prefill.kv_cache_tokens": 99})
    assert local.refuses(PREFILL, 2, False) is None
    assert local.refuses(PREFILL, 2, True) is not None


def test_an_encoder_that_the_memory_does_not_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("easerve.search.machine.ACTIVATION_BYTES", 1 << 40)
    why = simulated(A100).refuses(ENCODE, 1, False)
    assert why is not None
    assert why.startswith("an encoder needs 11")


def test_without_nvlink_prefill_on_four_takes_longer_than_on_two() -> None:
    ada, a100 = simulated(ADA).prefill_s, simulated(A100).prefill_s
    assert ada is not None
    assert a100 is not None
    assert ada(4) > ada(2)
    assert a100(4) < a100(2)


def test_on_a_cpu_devices_are_the_engines_that_a_scenario_allows() -> None:
    machine = simulated("tiny-llava-cpu")
    assert (len(machine.devices), machine.shares_cores) == (3, True)
    assert machine.refuses(PREFILL, 1, False) is None
    assert machine.refuses(PREFILL, 2, False) is not None


def test_a_scenario_without_our_system_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no section systems\.easerve"):
        simulated(ADA, {"systems.easerve": None, "system": "vllm"})


# Of a deployment file -----------------------------------------------------------------------------


def gpus(num: int = 8, **content: object) -> Machine:
    return of_deployment(on_gpus(**content), info=INFO, driver=Links(num, [(0, 1)]))


def test_the_driver_tells_gpus_and_islands_and_the_plan_tells_what_fits() -> None:
    machine = gpus()
    assert machine.devices == tuple(range(8))
    assert machine.islands == ((0, 1),)
    assert machine.names_devices
    why = machine.refuses(DECODE, 1, False)
    assert why is not None
    assert "weights 64.00 GiB" in why
    assert machine.refuses(DECODE, 2, False) is None
    assert machine.refuses(ENCODE, 1, False) is None


def test_local_prefill_needs_room_beside_its_encoders() -> None:
    machine = gpus()
    assert machine.refuses(PREFILL, 2, True) is None
    assert gpus(gpu_memory="36.2GiB").refuses(PREFILL, 2, True) is not None
    machine = gpus(gpu_memory="140GiB")
    assert machine.refuses(PREFILL, 1, True) is None


def test_the_largest_request_must_fit_and_the_longest_that_vllm_prepares_for() -> None:
    small, large = (
        on_gpus(engine={"max_model_len": 4096}),
        on_gpus(engine={"max_model_len": 90_000}),
    )
    driver = Links(8)
    assert of_deployment(small, info=INFO, driver=driver).refuses(DECODE, 2, False) is None
    why = of_deployment(large, info=INFO, driver=driver).refuses(DECODE, 2, False)
    assert why == "its KV cache of 84759 tokens does not hold a request of 90000"
    asked = of_deployment(small, info=INFO, driver=driver, max_tokens=90_000)
    assert asked.refuses(DECODE, 2, False) == why


def test_gpus_can_be_chosen() -> None:
    machine = of_deployment(on_gpus(), info=INFO, driver=Links(8, [(0, 1), (6, 7)]), gpus=[1, 6, 7])
    assert (machine.devices, machine.islands) == ((1, 6, 7), ((6, 7),))
    with pytest.raises(ConfigError, match=r"GPUs \[8\]: this machine has 8"):
        of_deployment(on_gpus(), info=INFO, driver=Links(8), gpus=[0, 8])


def test_what_a_file_says_of_its_encoders_does_not_stay() -> None:
    machine = gpus(encode={"tensor_parallel_size": 2, "devices": [[0, 1]]})
    assert machine.fixed == {"encode.tensor_parallel_size": 1}
    assert machine.refuses(PREFILL, 2, True) is None


def test_memory_that_nobody_knows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "detect_gpu_bytes", lambda: None)
    with pytest.raises(ConfigError, match="set gpu_memory"):
        gpus(gpu_memory=None)
    monkeypatch.setattr(memory, "detect_gpu_bytes", lambda: 48 * GIB)
    assert gpus(gpu_memory=None).title == "8 GPUs of 48.00 GiB"


def test_weights_that_are_not_here_are_an_error() -> None:
    with pytest.raises(ConfigError, match="download the model first"):
        of_deployment(on_gpus(), info=ModelInfo(), driver=Links(8))


def test_a_machine_without_a_driver_is_an_error_unless_it_is_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(ConfigError, match="NVIDIA driver"):
        of_deployment(on_gpus(), info=INFO)
    assert of_deployment(build({"model": "acme/m"}, "test"), info=TINY).shares_cores


def test_on_a_cpu_there_are_as_many_engines_as_asked_or_a_few_more_than_cores() -> None:
    deployment = build({"model": "acme/m", "encode": {"cores": [[0]]}}, "test")
    machine = of_deployment(deployment, info=TINY)
    assert len(machine.devices) == len(os.sched_getaffinity(0)) + SPARE_ENGINES
    assert machine.fixed == {"encode.cores": None}
    assert len(of_deployment(deployment, info=TINY, max_engines=7).devices) == 7


def test_on_a_cpu_engines_share_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = build({"model": "acme/m", "engine": {"dtype": "bfloat16"}}, "test")
    each = (1 << 20) + memory.CPU_KV_CACHE_BYTES
    monkeypatch.setattr(memory, "detect_host_bytes", lambda: (1 << 20) + 2 * each)
    machine = of_deployment(deployment, info=TINY)
    assert machine.refuses_all(1, 1, 1, False) is None
    why = machine.refuses_all(1, 1, 1, True)
    assert why is not None
    assert "local-prefill-0" in why
    assert machine.refuses_all(1, 2, 1, False) is not None
