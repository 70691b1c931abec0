"""The probe between two threads over one cell; the GPU is a model of who slows down whom."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from easerve.engines.partition.cell import Cell, Word
from easerve.engines.partition.cuda import Cuda
from easerve.engines.partition.green import GreenDriver
from easerve.engines.partition.probe import (
    ABSENT,
    Gemm,
    Times,
    Verdict,
    Work,
    decline,
    judge,
    prove,
)
from easerve.types import Stage
from tests.engines.partition.fake_cuda import FakeCuda
from tests.engines.partition.fake_torch import FakeTorch

ALONE_S = 0.002
WORK_S = 0.003


class Gpu:
    """Parts of two processes. A repetition takes ``ALONE_S``, and is slowed down as ``slowdown``
    says of the two parts when both work. Work at once is checked to be so, work alone too.
    """

    def __init__(self, slowdown: Callable[[Stage, Stage], float]) -> None:
        self.slowdown = slowdown
        self.lock, self.both = threading.Lock(), threading.Barrier(2, timeout=5)
        self.runs: dict[Stage, Stage] = {}
        self.done: dict[Stage, int] = {Stage.ENCODE: 0, Stage.PREFILL: 0}
        self.alone: list[Stage] = []

    def work(self, stage: Stage) -> Work:
        def run(part: Stage, seconds: float) -> float:
            assert seconds == WORK_S
            first = self.done[stage] == 0
            self.done[stage] += 1
            with self.lock:
                assert not (first and self.runs)
                self.runs[stage] = part
            slow = 1.0
            if first:
                self.alone.append(stage)
            else:
                self.both.wait()
                slow = self.slowdown(self.runs[Stage.ENCODE], self.runs[Stage.PREFILL])
                self.both.wait()
            with self.lock:
                del self.runs[stage]
            return ALONE_S * slow

        return run


def disjoint(encode: Stage, prefill: Stage) -> float:
    return 2.0 if encode is prefill else 1.02


def overlapping(encode: Stage, prefill: Stage) -> float:
    return 2.0 if encode is prefill else 1.4


def time_slicing(encode: Stage, prefill: Stage) -> float:
    return 2.05


def idle(encode: Stage, prefill: Stage) -> float:
    return 1.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Cell.create(tmp_path / "cell")
    return tmp_path / "cell"


class Died(BaseException):
    """An engine's end, of which its code hears nothing."""


class Side(threading.Thread):
    def __init__(self, path: Path, stage: Stage, work: Work, step_s: float = 5.0) -> None:
        super().__init__(daemon=True)
        self.path, self.stage, self.work, self.step_s = path, stage, work, step_s
        self.verdict: Verdict | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        cell = Cell(self.path)
        try:
            self.verdict = prove(
                cell, self.stage, self.work, meet_s=5, step_s=self.step_s, work_s=WORK_S
            )
        except (Exception, Died) as error:
            self.error = error
        finally:
            cell.close()

    def end(self) -> Verdict | None:
        self.join(10)
        assert not self.is_alive()
        return self.verdict


def never(part: Stage, seconds: float) -> float:
    raise AssertionError("nothing was to be timed")


def pair(path: Path, gpu: Gpu) -> tuple[Verdict | None, Verdict | None]:
    prefill = Side(path, Stage.PREFILL, gpu.work(Stage.PREFILL))
    encode = Side(path, Stage.ENCODE, gpu.work(Stage.ENCODE))
    return encode.end(), prefill.end()


# The verdict -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disjoint", "same", "ok", "why"),
    [
        (Times(1.0, 2.0), Times(2.0, 4.0), True, r"1\.00 times .* disjoint parts, 2\.00 times"),
        (Times(1.15, 2.0), Times(1.6, 3.2), True, r"1\.15 times .* 1\.60 times"),
        (Times(1.16, 2.0), Times(2.0, 4.0), False, "overlap, or the engines take turns"),
        (Times(1.0, 2.4), Times(2.0, 4.0), False, r"1\.20 times .* overlap"),
        (Times(1.0, 2.0), Times(1.5, 3.2), False, "does not fill a part"),
        (Times(1.0, 2.0), Times(1.3, 8.0), True, r"2\.65 times"),
    ],
)
def test_the_verdict_is_by_slowdown(disjoint: Times, same: Times, ok: bool, why: str) -> None:
    verdict = judge(Times(1.0, 2.0), disjoint, same)
    assert verdict.ok is ok
    assert re.search(why, verdict.why)


# Two engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slowdown", "ok", "why"),
    [
        (disjoint, True, "1.02 times as long on disjoint parts, 2.00 times on the same"),
        (overlapping, False, "the parts overlap"),
        (time_slicing, False, "take turns (is MPS on?)"),
        (idle, False, "nothing is proved"),
    ],
)
def test_both_engines_have_one_verdict(
    path: Path, slowdown: Callable[[Stage, Stage], float], ok: bool, why: str
) -> None:
    gpu = Gpu(slowdown)
    encode, prefill = pair(path, gpu)
    assert encode is not None
    assert encode == prefill
    assert encode.ok is ok
    assert why in encode.why
    assert gpu.alone == [Stage.ENCODE, Stage.PREFILL]
    assert gpu.done == {Stage.ENCODE: 3, Stage.PREFILL: 3}


@pytest.mark.parametrize("stage", [Stage.ENCODE, Stage.PREFILL])
@pytest.mark.parametrize("slowdown", [disjoint, overlapping])
def test_an_engine_that_starts_again_takes_the_verdict_over(
    path: Path, stage: Stage, slowdown: Callable[[Stage, Stage], float]
) -> None:
    first, _ = pair(path, Gpu(slowdown))
    other = Stage.PREFILL if stage is Stage.ENCODE else Stage.ENCODE
    for again in (stage, stage, other, stage):
        assert Side(path, again, never).end() == first


@pytest.mark.parametrize("stage", [Stage.ENCODE, Stage.PREFILL])
def test_an_engine_does_not_wait_for_ever(path: Path, stage: Stage) -> None:
    now_ns = 10**9

    def sleep(seconds: float) -> None:
        nonlocal now_ns
        now_ns += round(seconds * 10**9)

    cell = Cell(path, lambda: now_ns)
    assert prove(cell, stage, never, meet_s=2, sleep=sleep) == ABSENT
    assert 3 <= now_ns / 10**9 < 3.1
    cell.close()
    other = Stage.PREFILL if stage is Stage.ENCODE else Stage.ENCODE
    assert Side(path, other, never).end() == ABSENT


@pytest.mark.parametrize("stage", [Stage.ENCODE, Stage.PREFILL])
@pytest.mark.parametrize("waits", [False, True])
def test_who_declines_is_not_waited_for(path: Path, stage: Stage, waits: bool) -> None:
    """Whether it does before the other comes or while that waits."""
    cell = Cell(path)
    polls: list[float] = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        decline(cell, stage)

    if not waits:
        decline(cell, stage)
    other = Stage.PREFILL if stage is Stage.ENCODE else Stage.ENCODE
    assert prove(cell, other, never, sleep=sleep) == ABSENT
    assert len(polls) == waits
    cell.close()


def failing(part: Stage, seconds: float) -> float:
    raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("stage", [Stage.ENCODE, Stage.PREFILL])
def test_a_work_that_fails_ends_the_probe_for_both(path: Path, stage: Stage) -> None:
    other = Stage.PREFILL if stage is Stage.ENCODE else Stage.ENCODE
    waiting = Side(path, other, lambda part, seconds: 1.0)
    failed = Side(path, stage, failing)
    assert failed.end() is None
    assert isinstance(failed.error, RuntimeError)
    assert waiting.end() == ABSENT


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("stage", [Stage.ENCODE, Stage.PREFILL])
def test_an_engine_that_dies_on_the_way_is_missed(path: Path, stage: Stage, number: int) -> None:
    """It just stops, at its nth work; it starts again and hears that nothing was proved."""
    gone = threading.Event()
    ended = threading.Event()
    runs = 0

    def dies(part: Stage, seconds: float) -> float:
        nonlocal runs
        runs += 1
        if runs == number:
            gone.set()
            ended.wait(5)
            raise Died
        return 1.0

    other = Stage.PREFILL if stage is Stage.ENCODE else Stage.ENCODE
    dying = Side(path, stage, dies, 0.05)
    left = Side(path, other, lambda part, seconds: 1.0, 0.05)
    assert gone.wait(5)
    assert left.end() == ABSENT
    assert Side(path, stage, never).end() == ABSENT
    ended.set()
    assert dying.end() is None


def test_an_engine_that_starts_again_on_the_way_ends_the_probe(path: Path) -> None:
    again: list[Side] = []

    def restarts(part: Stage, seconds: float) -> float:
        words = Cell(path)
        words.words[Word.ENCODE_PROBE + 1] += 2  # as another process of the encoder's would
        words.close()
        again.append(Side(path, Stage.ENCODE, never))
        again[0].end()
        raise Died

    encode = Side(path, Stage.ENCODE, restarts)
    assert Side(path, Stage.PREFILL, never).end() == ABSENT
    assert encode.end() is None
    assert again[0].verdict == ABSENT


def test_what_a_dead_engine_left_does_not_count_as_coming(path: Path) -> None:
    cell = Cell(path)
    assert prove(cell, Stage.PREFILL, never, meet_s=0.001) == ABSENT
    cell.words[Word.PREFILL_PROBE] = 0  # it died before it could give up
    cell.close()
    gpu = Gpu(disjoint)
    encode = Side(path, Stage.ENCODE, gpu.work(Stage.ENCODE))
    prefill = Side(path, Stage.PREFILL, gpu.work(Stage.PREFILL))
    assert encode.end() == prefill.end()
    assert encode.verdict is not None
    assert encode.verdict.ok


def test_two_processes(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from easerve.engines.partition.cell import Cell\n"
        "from easerve.engines.partition.probe import prove; from easerve.types import Stage\n"
        "times = iter((1.0, 1.0, 2.0))\n"
        "cell = Cell(Path(sys.argv[1]))\n"
        "verdict = prove(cell, Stage.PREFILL, lambda part, seconds: next(times), meet_s=20)\n"
        "print(verdict.why); sys.exit(0 if verdict.ok else 1)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, path], stdout=subprocess.PIPE, text=True
    )
    times = iter((3.0, 3.3, 6.0))
    cell = Cell(path)
    verdict = prove(cell, Stage.ENCODE, lambda part, seconds: next(times), meet_s=20)
    cell.close()
    out, _ = other.communicate(timeout=20)
    assert (other.returncode, out.strip()) == (0, verdict.why)
    assert verdict == Verdict(True, "1.10 times as long on disjoint parts, 2.00 times on the same")


# The work ----------------------------------------------------------------------------------------


def test_products_run_on_the_part_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    driver = GreenDriver((Stage.PREFILL,), cuda=Cuda(FakeCuda()))
    work = Gemm(driver, 72, size=16, batch=2)
    encode, prefill = (driver.stream(stage, 72).name for stage in (Stage.ENCODE, Stage.PREFILL))
    assert torch.log == [
        "synchronize 0",
        *[f"multiply in {encode}"] * 2,
        f"synchronize {encode}",
        *[f"multiply in {prefill}"] * 2,
        f"synchronize {prefill}",
    ]
    torch.log.clear()
    times = iter((10.0, 10.5, 11.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    assert work(Stage.ENCODE, 1.0) == 0.25
    assert torch.log == [*[f"multiply in {encode}"] * 2, f"synchronize {encode}"] * 2
