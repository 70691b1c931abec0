"""What our workers do around the steps of vLLM's, over a stand-in for that one."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from easerve.engines.partition import attach
from easerve.engines.partition.attach import Tools
from easerve.engines.partition.cell import Cell, State
from easerve.engines.partition.setup import SETUP, Setup
from easerve.engines.partition.sides import Undivided
from easerve.engines.vllm.worker import DividedWorker, EncodeWorker, PrefillWorker
from easerve.policy.partition import Levels
from easerve.types import NS_PER_S

from .partition.fake_torch import FakeTorch

EARLIER, DONE = object(), "the answer"


class Later:
    """An output that is still to come."""

    def get_output(self) -> str:
        return DONE


class VllmWorker:
    """Its steps give what is in ``outputs``; ``seen``: the state of the cell meanwhile."""

    def __init__(self, world_size: int = 1, runner: Any = None) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=world_size))
        self.model_runner = runner
        self.outputs: list[Any] = []
        self.seen: list[State] = []
        self.cell: Cell | None = None
        self.device = "cuda:0"
        self.num_dummies = 0

    def compile_or_warm_up_model(self) -> object:
        assert getattr(self, "side", None) is None, "it is warmed up with all of its device"
        return EARLIER

    def _run(self) -> Any:
        if self.cell is not None:
            self.seen.append(self.cell.state())
        output = self.outputs.pop(0)
        if isinstance(output, Exception):
            raise output
        return output

    def execute_model(self, scheduler_output: object) -> Any:
        return self._run()

    def sample_tokens(self, grammar_output: object) -> Any:
        return self._run()

    def execute_dummy_batch(self) -> None:
        self.num_dummies += 1


class Lends(DividedWorker):
    def tools(self) -> Tools:
        return Tools()


class Encoder(Lends, EncodeWorker, VllmWorker):
    pass


class Prefiller(Lends, PrefillWorker, VllmWorker):
    def pending(self, output: Any, side: Any) -> Any:
        return output, side.step


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cell:
    """Of the device that this process is told to divide."""
    path = tmp_path / "encode-0.cell"
    Cell.create(path)
    setup = Setup(cell=str(path), driver="gate", why="for a test")
    for name, value in setup.to_environment().items():
        monkeypatch.setenv(name, value)
    return Cell(path)


def started(worker: Any, cell: Cell, *outputs: Any) -> Any:
    worker.compile_or_warm_up_model()
    worker.cell, worker.outputs = cell, list(outputs)
    return worker


def encoding(*requests: str) -> SimpleNamespace:
    return SimpleNamespace(scheduled_encoder_inputs={name: [0] for name in requests})


def prefilling(num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(total_num_scheduled_tokens=num_tokens)


# Of both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Encoder, Prefiller])
def test_a_side_is_taken_when_the_worker_is_warm(kind: Callable[..., Any], cell: Cell) -> None:
    worker = kind()
    assert worker.side is None
    assert worker.compile_or_warm_up_model() is EARLIER
    assert worker.side is not None


@pytest.mark.parametrize("kind", [Encoder, Prefiller])
def test_a_worker_warms_its_parts_up(
    kind: Callable[..., Any], cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Undivided("sms", Levels(132, 8, 1, (8, 24)))
    confined: list[int] = []
    monkeypatch.setattr(driver, "confine", lambda _, units: confined.append(units))
    monkeypatch.setattr(attach, "Undivided", lambda *_: driver)
    monkeypatch.setattr(kind, "warm_up", lambda _: confined.append(-1))
    kind().compile_or_warm_up_model()
    assert confined == [8, -1, 24, -1, 0]


@pytest.mark.parametrize("kind", [Encoder, Prefiller])
def test_a_worker_that_is_told_of_no_device_is_vllms(
    kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SETUP, raising=False)
    worker = kind(world_size=2)
    assert worker.compile_or_warm_up_model() is EARLIER
    assert worker.side is None
    later = Later()
    worker.outputs = [DONE, None, later]
    assert worker.execute_model(SimpleNamespace()) == DONE
    assert worker.execute_model(SimpleNamespace()) is None
    assert worker.sample_tokens(None) is later


@pytest.mark.parametrize("kind", [Encoder, Prefiller])
def test_an_engine_of_several_ranks_is_refused(kind: Callable[..., Any], cell: Cell) -> None:
    with pytest.raises(ValueError, match="an engine of one rank, not 2: take pipeline and"):
        kind(world_size=2).compile_or_warm_up_model()


def test_a_device_has_to_be_one_of_a_kind() -> None:
    for call in (DividedWorker().tools, lambda: DividedWorker().attach(Setup(**NOTHING))):
        with pytest.raises(NotImplementedError):
            call()
    with pytest.raises(NotImplementedError):
        PrefillWorker().pending(None, None)  # type: ignore[arg-type]


NOTHING: dict[str, Any] = {"cell": "", "driver": "", "why": ""}


# Encoders -----------------------------------------------------------------------------------------


def test_a_forward_has_its_part_from_its_begin_to_its_end(cell: Cell) -> None:
    worker = started(Encoder(), cell, DONE, DONE)
    cell.announce(2, NS_PER_S)
    for number in range(2):
        assert worker.execute_model(encoding("r")) == DONE
        assert (worker.seen[number].encode_units, worker.seen[number].forwards) == (1, number)
        assert worker.seen[number].demanded == 2, "prefill leaves it what it demands"
        assert cell.state().forwards == number + 1
        assert cell.state().demanded == 0, "prefill need not wait for the answer"


def test_a_step_that_encodes_nothing_takes_nothing(cell: Cell) -> None:
    worker = started(Encoder(), cell, DONE)
    cell.announce(2, NS_PER_S)
    assert worker.execute_model(encoding()) == DONE
    assert cell.state().forwards == 0
    assert cell.state().demanded == 2, "what was announced is yet to come"


def test_a_forward_that_fails_has_ended(cell: Cell) -> None:
    worker = started(Encoder(), cell, RuntimeError("out of memory"))
    cell.announce(2, NS_PER_S)
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.execute_model(encoding("r"))
    assert (cell.state().forwards, cell.state().demanded) == (1, 0)


# Prefill ------------------------------------------------------------------------------------------


def test_a_step_runs_until_its_output_is_there(cell: Cell) -> None:
    worker = started(Prefiller(), cell, DONE)
    assert worker.execute_model(prefilling(5)) == DONE
    assert [state.leaves for state in worker.seen] == [0]
    assert cell.state().leaves is None
    assert cell.state().steps == 1


def test_a_step_whose_tokens_are_sampled_next_ends_with_them(cell: Cell) -> None:
    worker = started(Prefiller(), cell, None, DONE)
    assert worker.execute_model(prefilling(5)) is None
    assert cell.state().leaves == 0
    assert worker.sample_tokens(None) == DONE
    assert [state.leaves for state in worker.seen] == [0, 0]
    assert cell.state().leaves is None
    assert cell.state().steps == 1


def test_a_step_that_computes_nothing_is_none(cell: Cell) -> None:
    worker = started(Prefiller(), cell, DONE)
    assert worker.execute_model(prefilling(0)) == DONE
    assert [state.leaves for state in worker.seen] == [None]
    assert cell.state().steps == 0


@pytest.mark.parametrize("sampled", [False, True])
def test_an_output_that_is_still_to_come_belongs_to_its_step(cell: Cell, sampled: bool) -> None:
    first, second = Later(), Later()
    before = [None] if sampled else []
    worker = started(Prefiller(), cell, *before, first, *before, second)

    def step() -> Any:
        output = worker.execute_model(prefilling(5))
        return worker.sample_tokens(None) if sampled else output

    assert step() == (first, 1)
    assert step() == (second, 2)
    assert cell.state().leaves == 0


def test_a_step_that_computes_nothing_does_not_end_the_one_before(cell: Cell) -> None:
    worker = started(Prefiller(), cell, Later(), DONE)
    worker.execute_model(prefilling(5))
    assert worker.execute_model(prefilling(0)) == DONE
    assert cell.state().leaves == 0


# On a CPU and on a GPU ----------------------------------------------------------------------------


class AsyncModelRunnerOutput:
    pass


@contextmanager
def imported(name: str, **stand_ins: dict[str, Any]) -> Iterator[Any]:
    """One of our modules over stand-ins for others, whose dots are written as two underscores."""
    fakes: dict[str, ModuleType] = {}
    for path, content in stand_ins.items():
        parts = path.split("__")
        for length in range(1, len(parts) + 1):
            module = ".".join(parts[:length])
            fakes.setdefault(module, ModuleType(module))
        vars(fakes[".".join(parts)]).update(content)
    with mock.patch.dict(sys.modules, fakes):
        sys.modules.pop(name, None)
        yield importlib.import_module(name)


@pytest.fixture
def torch() -> FakeTorch:
    return FakeTorch()


@pytest.fixture
def cuda(torch: FakeTorch) -> Iterator[Any]:
    names = ("bfloat16", "cuda", "mm", "zeros")
    with imported(
        "easerve.engines.vllm.cuda_worker",
        torch={name: getattr(torch, name) for name in names},
        vllm__v1__outputs={"AsyncModelRunnerOutput": AsyncModelRunnerOutput},
        vllm__v1__worker__gpu_worker={"Worker": VllmWorker},
    ) as module:
        yield module


@pytest.mark.parametrize("output", [DONE, RuntimeError("it went wrong")], ids=str)
def test_on_a_gpu_a_forward_ends_when_its_kernels_have(
    cuda: Any, torch: FakeTorch, cell: Cell, monkeypatch: pytest.MonkeyPatch, output: Any
) -> None:
    worker = started(cuda.CudaEncodeWorker(), cell, output)
    seen: list[tuple[int, int]] = []

    def synchronize() -> None:
        assert worker.seen, "they have been submitted"
        seen.append((cell.state().forwards, cell.state().demanded))

    monkeypatch.setattr(torch.now, "synchronize", synchronize)
    cell.announce(2, NS_PER_S)
    with pytest.raises(RuntimeError) if output is not DONE else nullcontext():
        worker.execute_model(encoding("r"))
    assert seen == [(0, 2)], "prefill leaves it its part until then"
    assert (cell.state().forwards, cell.state().demanded) == (1, 0)


def test_on_a_gpu_warm_up_is_work_in_the_stream_of_the_moment(cuda: Any, torch: FakeTorch) -> None:
    cuda.CudaEncodeWorker().warm_up()
    assert torch.log == ["multiply in home", "synchronize home"]
    torch.log.clear()
    worker = cuda.CudaPrefillWorker()
    worker.warm_up()
    assert (worker.num_dummies, torch.log) == (1, ["synchronize home"])


def test_on_a_gpu_a_step_ends_when_its_output_is_asked_for(cuda: Any, cell: Cell) -> None:
    worker = started(cuda.CudaPrefillWorker(), cell, Later(), Later())
    first, second = (worker.execute_model(prefilling(5)) for _ in range(2))
    assert all(isinstance(each, AsyncModelRunnerOutput) for each in (first, second))
    for pending in (first, second):
        assert cell.state().leaves == 0
        assert pending.get_output() == DONE
    assert cell.state().leaves is None
    assert cell.state().steps == 2


def test_on_a_gpu_the_last_output_ends_all_steps_before_it(cuda: Any, cell: Cell) -> None:
    worker = started(cuda.CudaPrefillWorker(), cell, Later(), Later(), Later())
    _, second, third = (worker.execute_model(prefilling(5)) for _ in range(3))
    second.get_output()
    assert cell.state().leaves == 0, "the third runs"
    third.get_output()
    assert cell.state().leaves is None


class SecondRunner:
    @cached_property
    def main_stream(self) -> str:
        return "the stream of its making"


class FirstRunner:
    pass


@pytest.mark.parametrize("looked_up", [False, True])
def test_the_stream_that_the_v2_runner_keeps_is_replaced(cuda: Any, looked_up: bool) -> None:
    runner = SecondRunner()
    if looked_up:
        assert runner.main_stream == "the stream of its making"
    for worker in (cuda.CudaEncodeWorker(runner=runner), cuda.CudaPrefillWorker(runner=runner)):
        for stream in ("a part", "everything"):
            worker.tools().on_switch(stream)
            assert runner.main_stream == stream


def test_the_v1_runner_is_left_alone(cuda: Any) -> None:
    runner = FirstRunner()
    cuda.CudaEncodeWorker(runner=runner).tools().on_switch("a part")
    assert vars(runner) == {}


def test_on_a_cpu_the_threads_are_those_of_torch_not_of_vllms_stub() -> None:
    counts: list[int] = []
    native = SimpleNamespace(set_num_threads=counts.append)
    with imported(
        "easerve.engines.vllm.cpu_worker",
        vllm__v1__worker__cpu_worker={"CPUWorker": VllmWorker},
        torch={"_C": native, "set_num_threads": lambda _: None},
    ) as module:
        for kind in (module.CpuEncodeWorker, module.CpuPrefillWorker):
            kind().tools().set_num_threads(3)
    assert counts == [3, 3]
