import ctypes
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from easerve.engines.partition.cuda import ADVICE, Code, Cuda, CudaError, Resource
from easerve.engines.partition.green import (
    PROFILED,
    GreenDriver,
    PriorityDriver,
    TorchStreams,
    cut,
    smallest_part,
)
from easerve.engines.partition.sides import DriverError
from easerve.policy.partition import ALL, HALF, Levels
from easerve.types import Stage
from tests.engines.partition.fake_cuda import Error, FakeCuda, FakeStream, FakeStreams
from tests.engines.partition.fake_torch import FakeTorch

BOTH = (Stage.ENCODE, Stage.PREFILL)


def made(
    library: FakeCuda,
    stages: tuple[Stage, ...] = BOTH,
    streams: FakeStreams | None = None,
    **options: object,
) -> GreenDriver:
    return GreenDriver(
        stages,
        cuda=Cuda(library),
        streams=streams or FakeStreams(),
        **options,  # type: ignore[arg-type]
    )


# The driver's calls ------------------------------------------------------------------------------


def test_a_device_is_described() -> None:
    cuda = Cuda(FakeCuda())
    device = cuda.device(0)
    assert (cuda.version(), cuda.num_devices()) == (13000, 1)
    assert (device.name, device.capability, device.num_sms) == ("Fake H200", (9, 0), 132)
    assert device.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert device.mps is True


def test_an_old_driver_does_not_know_of_mps() -> None:
    assert Cuda(FakeCuda(version=12020)).device(0).mps is None


def test_without_a_driver_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("easerve.engines.partition.cuda.LIBRARY", "libnosuch.so.1")
    with pytest.raises(DriverError, match=r"no CUDA driver: libnosuch\.so\.1"):
        Cuda()


def test_a_driver_without_a_call_is_too_old() -> None:
    class Old:
        pass

    with pytest.raises(DriverError, match=r"has no cuInit; driver 550 \(CUDA 12\.4\)"):
        Cuda(Old()).num_devices()


def test_a_driver_without_green_contexts_is_told_by_its_version() -> None:
    with pytest.raises(DriverError, match=r"offers CUDA 12\.2; green contexts need 12\.4"):
        made(FakeCuda(version=12020))


@pytest.mark.parametrize(
    "call",
    [
        "cuDriverGetVersion",
        "cuInit",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetUuid_v2",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuDeviceGetDevResource",
        "cuDevSmResourceSplitByCount",
        "cuDevResourceGenerateDesc",
        "cuGreenCtxCreate",
        "cuGreenCtxGetDevResource",
        "cuGreenCtxStreamCreate",
    ],
)
def test_a_call_that_fails_is_named_and_leaves_nothing_behind(call: str) -> None:
    library = FakeCuda()
    library.fail[call] = Error(2, b"CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError, match=rf"{call} failed with CUDA_ERROR_OUT_OF_MEMORY \(2\); "):
        made(library)
    assert (library.contexts, library.streams, library.retained) == ({}, {}, 0)


@pytest.mark.parametrize("code", Code)
def test_every_code_that_is_known_comes_with_advice(code: Code) -> None:
    library = FakeCuda()
    library.fail["cuGreenCtxCreate"] = Error(code, f"CUDA_ERROR_{code.name}".encode())
    with pytest.raises(CudaError) as caught:
        made(library, (Stage.ENCODE,))
    assert (caught.value.call, caught.value.code) == ("cuGreenCtxCreate", code)
    assert str(caught.value).endswith(ADVICE[code])


def test_an_unknown_code_is_told_as_it_is() -> None:
    library = FakeCuda()
    library.fail["cuInit"] = Error(12345, b"")
    with pytest.raises(CudaError, match=r"cuInit failed with an unknown error \(12345\)$"):
        Cuda(library).device(0)


def test_a_failure_half_way_destroys_what_there_was() -> None:
    library = FakeCuda()
    library.fail_nth["cuGreenCtxStreamCreate", 3] = Error(2, b"CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError, match="cuGreenCtxStreamCreate"):
        made(library)
    assert library.calls.count("cuGreenCtxDestroy") == 4
    assert library.calls.count("cuStreamDestroy_v2") == 3
    assert (library.contexts, library.streams, library.retained) == ({}, {}, 0)


# Granules and levels -----------------------------------------------------------------------------


def test_a_hopper_is_cut_into_granules_of_eight() -> None:
    library = FakeCuda()
    driver = made(library)
    assert driver.layout == Levels(132, 8, 1, (8, 24, 40, 72, 120))
    assert driver.counts == {
        **{(Stage.ENCODE, level): level for level in driver.layout.levels},
        **{(Stage.PREFILL, level): 132 - level for level in driver.layout.levels},
    }
    assert driver.idle_sms == 0
    assert library.calls.count("cuDevSmResourceSplitByCount") == 1
    assert all(min(part.context_s, part.stream_s) >= 0 for part in driver.parts.values())


def test_parts_nest_and_complements_are_disjoint_across_processes() -> None:
    one, other = FakeCuda(), FakeCuda()
    encoder, prefill = made(one, (Stage.ENCODE,)), made(other, (Stage.PREFILL,))
    assert encoder.layout == prefill.layout
    levels = encoder.layout.levels
    for index, units in enumerate(levels):
        mine = one.sms(encoder.stream(Stage.ENCODE, units))
        assert mine == set(range(units))
        for left in levels[index:]:
            assert not mine & other.sms(prefill.stream(Stage.PREFILL, left))


def test_an_engine_makes_its_own_parts_and_others_when_asked() -> None:
    library = FakeCuda()
    driver = made(library, (Stage.PREFILL,))
    assert {stage for stage, _ in driver.counts} == {Stage.PREFILL}
    stream = driver.stream(Stage.ENCODE, 72)
    assert driver.stream(Stage.ENCODE, 72) is stream
    assert driver.counts[Stage.ENCODE, 72] == 72
    with pytest.raises(DriverError, match=r"no part of 48 SMs, only of \(8, 24, 40, 72, 120\)"):
        driver.stream(Stage.ENCODE, 48)


@pytest.mark.parametrize(
    ("library", "granule", "levels"),
    [
        (FakeCuda(108, 4, 2, capability=(8, 0)), 4, (8, 24, 40, 72, 104)),
        (FakeCuda(142, 4, 2, capability=(8, 9)), 4, (8, 24, 40, 72, 136)),
        (FakeCuda(80, 2, 2, capability=(7, 0)), 2, (8, 24, 40, 72, 78)),
        (FakeCuda(40, 2, 2, capability=(7, 5)), 2, (8, 24, 38)),
        (FakeCuda(60, 0, 0, version=12040), 2, (8, 24, 40, 58)),
        (FakeCuda(46, 6, 6), 6, (12, 24, 36)),
    ],
)
def test_granules_are_what_the_driver_makes_of_the_smallest_part(
    library: FakeCuda, granule: int, levels: tuple[int, ...]
) -> None:
    driver = made(library)
    assert (driver.layout.granule, driver.layout.levels) == (granule, levels)
    for level in levels:
        assert driver.counts[Stage.ENCODE, level] == level
        assert driver.counts[Stage.PREFILL, level] == library.num_sms - level
    assert smallest_part(Cuda(library)) == granule


def test_prefill_keeps_what_it_is_to_keep() -> None:
    assert made(FakeCuda(), min_prefill=30).layout.levels == (8, 24, 40, 72, 96)
    assert made(FakeCuda(), min_prefill=12).layout.parts[-1] == 120
    with pytest.raises(DriverError, match="none is left beside 125 for prefill"):
        made(FakeCuda(), min_prefill=125)


def test_a_device_of_one_granule_cannot_be_divided() -> None:
    with pytest.raises(DriverError, match="none is left"):
        made(FakeCuda(14))
    with pytest.raises(DriverError, match=r"granules of \[\] SMs"):
        made(FakeCuda(4))


def test_demands_are_rounded_up_to_a_level() -> None:
    layout = cut(Cuda(FakeCuda())).layout((8, 24, 48, 64), 1)
    rounded = [layout.round(units) for units in (0, 1, 8, 9, 25, 64, 65, 120, 132)]
    assert rounded == [0, 8, 8, 24, 48, 64, 120, 120, 120]
    assert (layout.round(ALL), layout.round(HALF)) == (132, 64)
    assert layout.parts == (8, 24, 48, 64, 120)


def test_finer_levels_for_a_profile() -> None:
    driver = made(FakeCuda(), (Stage.ENCODE,), levels=PROFILED)
    assert list(driver.counts.values()) == [8, 16, 24, 32, 48, 64, 96, 120]


def test_a_driver_that_does_not_merge_the_rest_leaves_it_idle() -> None:
    library = FakeCuda(merges_rest=False)
    driver = made(library)
    assert driver.idle_sms == 4
    assert driver.counts[Stage.PREFILL, 120] == 8
    assert driver.counts[Stage.PREFILL, 8] == 120
    assert library.calls.count("cuDevResourceGenerateDesc") == 5 + 5 + 1


def test_a_rest_that_is_merged_but_not_given_is_left_idle_too() -> None:
    driver = made(FakeCuda(given=lambda asked: asked // 8 * 8))
    assert (driver.idle_sms, driver.counts[Stage.PREFILL, 72]) == (4, 56)


def test_an_error_that_is_no_refusal_of_the_rest_is_one() -> None:
    library = FakeCuda()
    library.fail["cuGreenCtxCreate"] = Error(2, b"CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        made(library, (Stage.PREFILL,))
    assert library.calls.count("cuGreenCtxCreate") == 1


def test_a_part_with_other_sms_than_asked_for_is_refused() -> None:
    library = FakeCuda(given=lambda asked: 114 if asked == 120 else asked)
    with pytest.raises(DriverError, match="a part of 120 SMs was asked for, and one of 114 made"):
        made(library, (Stage.ENCODE,))
    assert (library.contexts, library.streams, library.retained) == ({}, {}, 0)


# Switching ---------------------------------------------------------------------------------------


def test_every_switch_waits_then_is_made_then_told() -> None:
    streams = FakeStreams()

    def told(stream: FakeStream) -> None:
        assert streams.now is stream
        streams.log.append(("told", stream.name))

    driver = made(FakeCuda(), (Stage.PREFILL,), streams, on_switch=told)
    narrow, wide = (driver.stream(Stage.PREFILL, units).name for units in (72, 8))
    for units in (72, 72, 8, 0, 0):
        driver.confine(Stage.PREFILL, units)
    assert streams.log == [
        ("wait", narrow, "home"),
        ("current", narrow),
        ("told", narrow),
        ("wait", wide, narrow),
        ("current", wide),
        ("told", wide),
        ("wait", "home", wide),
        ("current", "home"),
        ("told", "home"),
    ]


def test_home_is_the_stream_that_was_left() -> None:
    streams = FakeStreams()
    driver = made(FakeCuda(), (Stage.ENCODE,), streams)
    streams.now = moved = FakeStream("moved")
    driver.confine(Stage.ENCODE, 24)
    driver.confine(Stage.ENCODE, 0)
    assert streams.now is moved


def test_a_switch_that_fails_goes_home_and_says_so() -> None:
    streams = FakeStreams()
    driver = made(FakeCuda(), (Stage.ENCODE,), streams)
    driver.confine(Stage.ENCODE, 24)
    streams.broken = True
    with pytest.raises(DriverError, match="encode, level 72: CUDA error: an illegal"):
        driver.confine(Stage.ENCODE, 72)
    assert streams.now is streams.home
    driver.confine(Stage.ENCODE, 0)
    assert streams.now is streams.home


def test_a_first_switch_that_cannot_be_made_changes_nothing() -> None:
    streams = FakeStreams()
    driver = made(FakeCuda(), (Stage.ENCODE,), streams)
    with pytest.raises(DriverError, match="no such part"):
        driver.confine(Stage.ENCODE, 48)
    assert streams.log == []


def test_a_part_that_was_not_made_sends_the_process_home() -> None:
    streams = FakeStreams()
    driver = made(FakeCuda(), (Stage.ENCODE,), streams)
    driver.confine(Stage.ENCODE, 24)
    with pytest.raises(DriverError, match="no such part"):
        driver.confine(Stage.PREFILL, 24)
    assert streams.now is streams.home


def test_close_goes_home_and_destroys_everything_once() -> None:
    library, streams = FakeCuda(), FakeStreams()
    driver = made(library, BOTH, streams)
    driver.confine(Stage.ENCODE, 40)
    driver.close()
    driver.close()
    assert streams.now is streams.home
    assert (library.contexts, library.streams, library.retained) == ({}, {}, 0)
    ends = [name for name in library.calls if "Destroy" in name or "Synchronize" in name]
    assert ends == ["cuStreamSynchronize", "cuStreamDestroy_v2", "cuGreenCtxDestroy"] * 10
    assert not driver.counts


def test_close_goes_on_after_an_error() -> None:
    library = FakeCuda()
    driver = made(library, (Stage.ENCODE,))
    library.fail_nth["cuStreamSynchronize", 0] = Error(700, b"CUDA_ERROR_ILLEGAL_ADDRESS")
    driver.close()
    assert (library.contexts, library.streams, library.retained) == ({}, {}, 0)


# Torch -------------------------------------------------------------------------------------------


def test_streams_are_torchs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    streams = TorchStreams(2)
    home, part = streams.current(), streams.external(0x7F00)
    streams.wait(part, home)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: torch.log.append("vLLM's"))
    streams.make_current(part)
    assert torch.log == ["32512 on cuda:2 waits for home", "vLLM's"]
    assert streams.first().name == "new on cuda:2, -100"


def test_drivers_take_torchs_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    driver = GreenDriver((Stage.ENCODE,), cuda=Cuda(FakeCuda()))
    driver.confine(Stage.ENCODE, 8)
    PriorityDriver(Stage.ENCODE, 132).close()
    assert [line for line in torch.log if line.startswith("set")] == [
        f"set {driver.stream(Stage.ENCODE, 8).name}",
        "set new on cuda:0, -100",
        f"set {driver.stream(Stage.ENCODE, 8).name}",
    ]


# Priority ----------------------------------------------------------------------------------------


def test_only_the_encoder_has_priority() -> None:
    heard: list[FakeStream] = []
    streams, others = FakeStreams(), FakeStreams()
    driver = PriorityDriver(Stage.ENCODE, 132, streams=streams, on_switch=heard.append)
    prefill = PriorityDriver(Stage.PREFILL, 132, streams=others, on_switch=heard.append)
    assert streams.log == [("wait", "first", "home"), ("current", "first")]
    assert [stream.name for stream in heard] == ["first"]
    driver.confine(Stage.ENCODE, 0)
    prefill.confine(Stage.PREFILL, 0)
    assert others.log == []
    assert (driver.layout.round(24), driver.layout.round(ALL)) == (0, 132)
    for one in (driver, driver, prefill):
        one.close()
    assert streams.log[2:] == [("wait", "home", "first"), ("current", "home")]


# The layout of the real thing --------------------------------------------------------------------


def test_a_resource_has_the_layout_of_cuda_h() -> None:
    assert ctypes.sizeof(Resource) == 144
    assert [Resource.num_sms.offset, Resource.min_part.offset, Resource.alignment.offset] == [
        96,
        100,
        104,
    ]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_calls_are_right_for_a_compiled_library(tmp_path: Path) -> None:
    source, library = Path(__file__).with_name("libcuda.c"), tmp_path / "libcuda.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-O0", "-o", library, source],
        check=True,
        timeout=60,
    )
    driver = GreenDriver(BOTH, cuda=Cuda(ctypes.CDLL(str(library))), streams=FakeStreams())
    assert driver.device.name == "Compiled H200"
    assert driver.device.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert driver.device.mps is True
    assert driver.layout == Levels(132, 8, 1, (8, 24, 40, 72, 120))
    assert driver.counts[Stage.ENCODE, 120] == 120
    assert driver.counts[Stage.PREFILL, 120] == 12
    driver.close()
    alive = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "alive")
    assert alive.value == 0
    with pytest.raises(CudaError, match=r"cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE"):
        Cuda(ctypes.CDLL(str(library))).device(3)


@pytest.mark.engines
def test_torch_has_what_is_asked_of_its_streams() -> None:
    import torch

    device = TorchStreams(1)._device
    inspect.signature(torch.cuda.ExternalStream.__new__).bind(None, 1, device)
    inspect.signature(torch.cuda.Stream.__new__).bind(None, device, -100)
    inspect.signature(torch.cuda.current_stream).bind(device)
    inspect.signature(torch.cuda.set_stream).bind(None)
    inspect.signature(torch.cuda.Stream.wait_stream).bind(None, None)
