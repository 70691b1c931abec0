"""An engine's side of the cell: the driver that was chosen, or the one that needs nothing."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from easerve.engines.partition import attach, probe
from easerve.engines.partition.attach import Tools, attach_encode, attach_prefill
from easerve.engines.partition.cell import Cell
from easerve.engines.partition.probe import ABSENT, Verdict
from easerve.engines.partition.setup import Setup, division
from easerve.engines.partition.sides import DriverError, EncodeSide, PrefillSide, Undivided
from easerve.engines.protocol import Driven
from easerve.policy.partition import Indivisible, Layout
from easerve.types import NS_PER_S, Stage

SIDES: dict[Stage, Callable[[Setup, Tools], EncodeSide | PrefillSide]] = {
    Stage.ENCODE: attach_encode,
    Stage.PREFILL: attach_prefill,
}
each_side = pytest.mark.parametrize("stage", SIDES)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    path = tmp_path / "encode-0.cell"
    Cell.create(path)
    return Setup(cell=str(path), driver="cpu", why="by affinity", cores=(0, 1, 2, 3))


def told(setup: Setup, stage: Stage) -> Driven | None:
    """What one side has said of itself."""
    said = division(setup, Cell(Path(setup.cell)))
    return said.encode if stage is Stage.ENCODE else said.prefill


def with_driver(setup: Setup, **changes: Any) -> Setup:
    return msgspec.structs.replace(setup, **changes)


@each_side
def test_cores_are_divided_by_the_cpus_driver(setup: Setup, stage: Stage) -> None:
    counts: list[int] = []
    side = SIDES[stage](setup, Tools(set_num_threads=counts.append))
    assert told(setup, stage) == Driven("cpu", "by affinity", 4, (1, 2, 3))
    assert side._driver.layout == Layout(4, 1, 1)
    assert counts == [4]
    other = Stage.PREFILL if stage is Stage.ENCODE else Stage.ENCODE
    assert told(setup, other) is None


@each_side
def test_prefill_keeps_what_it_is_to_keep(setup: Setup, stage: Stage) -> None:
    SIDES[stage](with_driver(setup, min_prefill=3), Tools())
    assert told(setup, stage) == Driven("cpu", "by affinity", 4, (1,))


def test_without_cores_of_its_own_an_engine_divides_all_that_it_may_use(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 6, 7})
    attach_encode(with_driver(setup, cores=()), Tools())
    assert told(setup, Stage.ENCODE) == Driven("cpu", "by affinity", 3, (1, 2))


def test_hold_and_patience_are_the_deployments(setup: Setup) -> None:
    given = with_driver(setup, hold_s=0.25, patience_s=0.5)
    assert attach_encode(given, Tools())._patience_ns == NS_PER_S // 2
    assert attach_prefill(given, Tools())._hold._hold_ns == NS_PER_S // 4


# The driver that needs nothing --------------------------------------------------------------------


@each_side
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cores": (0,)}, "cpu: 1 cores cannot be divided"),
        ({"min_prefill": 4}, "cpu: 4 cores cannot be divided"),
        ({"driver": "smctrl"}, "smctrl: there is no driver 'smctrl'"),
    ],
    ids=str,
)
def test_where_a_driver_cannot_be_made_prefill_pauses_instead(
    setup: Setup,
    stage: Stage,
    changes: dict[str, Any],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = SIDES[stage](with_driver(setup, **changes), Tools())
    assert told(setup, stage) == Driven("gate", why, 1, ())
    assert isinstance(side._driver, Undivided)
    (message,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert message.endswith(why)


@each_side
def test_the_gate_may_be_chosen(
    setup: Setup, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    SIDES[stage](with_driver(setup, driver="gate"), Tools())
    assert told(setup, stage) == Driven("gate", "by affinity", 1, ())
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_behind_a_gate_the_encoder_has_everything_and_prefill_pauses(setup: Setup) -> None:
    gated = with_driver(setup, driver="gate")
    encode, prefill = attach_encode(gated, Tools()), attach_prefill(gated, Tools())
    cell = Cell(Path(setup.cell))
    cell.announce(2, 60 * NS_PER_S)
    assert encode.begin() == 1, "all that there is"
    encode.end()
    assert prefill.begin() == 0
    cell.announce(2, None)
    prefill._max_pause_ns = 0
    prefill.begin()
    assert cell.state().forced == 1


def test_a_driver_that_fails_later_is_reported(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object, stage: Stage, units: int) -> None:
        raise DriverError("no such core")

    side = attach_prefill(setup, Tools())
    monkeypatch.setattr(type(side._driver), "confine", fail)
    Cell(Path(setup.cell)).announce(2, NS_PER_S)
    assert side.begin() == 0
    assert Cell(Path(setup.cell)).state().prefill_failed
    assert "the device is not divided any more: no such core" in caplog.text


# On a GPU -----------------------------------------------------------------------------------------


class Sms:
    """In place of a driver of SMs: what it was made of."""

    made: list["Sms"]

    def __init__(self, *parts: Any, **more: Any) -> None:
        self.parts, self.more, self.closed = parts, more, False
        self.layout = Layout(132, 8, more["min_prefill"]) if "min_prefill" in more else self.whole
        self.made.append(self)

    name = "sms"
    whole: Layout = Indivisible(132)

    def confine(self, stage: Stage, units: int) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> type[Sms]:
    monkeypatch.setattr(Sms, "made", [], raising=False)
    for name in ("GreenDriver", "PriorityDriver"):
        monkeypatch.setattr(attach, name, Sms)
    monkeypatch.setattr(attach, "_num_sms", lambda: 132)
    monkeypatch.setattr(attach, "Gemm", lambda driver, level: (driver, level))
    return Sms


def on_switch(stream: object) -> None:
    """What the worker lends."""


def prove(verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> Sequence[Any]:
    """What the probe will say; what it is asked."""
    asked: list[Any] = []

    def proof(cell: Cell, stage: Stage, work: Any) -> Verdict:
        asked.append((stage, work))
        return verdict

    monkeypatch.setattr(attach, "prove", proof)
    return asked


@each_side
def test_sms_are_divided_once_it_is_proved_that_they_are(
    setup: Setup, stage: Stage, gpu: type[Sms], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prove(Verdict(True, "1.01 times"), monkeypatch)
    SIDES[stage](
        with_driver(setup, driver="green-context", min_prefill=16), Tools(on_switch=on_switch)
    )
    (driver,) = gpu.made
    assert driver.parts == ([stage],)
    assert driver.more == {"min_prefill": 16, "on_switch": on_switch}
    assert asked == [(stage, (driver, 64))], "half of them, in whole granules"
    assert told(setup, stage) == Driven(
        "sms", "by affinity; 1.01 times", 132, tuple(range(8, 117, 8))
    )
    assert not driver.closed


@each_side
def test_sms_that_are_not_divided_after_all_are_taken_in_turns(
    setup: Setup, stage: Stage, gpu: type[Sms], monkeypatch: pytest.MonkeyPatch
) -> None:
    prove(Verdict(False, "they overlap"), monkeypatch)
    SIDES[stage](with_driver(setup, driver="green-context"), Tools())
    assert [driver.closed for driver in gpu.made] == [True]
    said = told(setup, stage)
    assert said is not None
    assert (said.driver, said.parts) == ("gate", ())
    assert said.why.startswith("green-context: the two engines do not compute apart: they over")


@each_side
@pytest.mark.parametrize("fails", ["GreenDriver", "Gemm"])
def test_who_has_no_parts_keeps_the_other_engine_from_waiting(
    setup: Setup, stage: Stage, fails: str, gpu: type[Sms], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise {"GreenDriver": DriverError, "Gemm": RuntimeError}[fails]("out of memory")

    def sleep(_: float) -> None:
        raise AssertionError("there is nobody to wait for")

    monkeypatch.setattr(attach, fails, fail)
    SIDES[stage](with_driver(setup, driver="green-context"), Tools())
    said = told(setup, stage)
    assert said is not None
    assert said.driver == "gate"
    assert said.why.endswith("out of memory")
    other = Stage.PREFILL if stage is Stage.ENCODE else Stage.ENCODE
    assert probe.prove(Cell(Path(setup.cell)), other, lambda *_: 1.0, sleep=sleep) == ABSENT


@each_side
def test_priority_needs_no_proof(setup: Setup, stage: Stage, gpu: type[Sms]) -> None:
    SIDES[stage](with_driver(setup, driver="priority"), Tools(on_switch=on_switch))
    (driver,) = gpu.made
    assert (driver.parts, driver.more) == ((stage, 132), {"on_switch": on_switch})
    assert told(setup, stage) == Driven("sms", "by affinity", 132, ())


@each_side
def test_a_static_partition_cannot_be_changed(setup: Setup, stage: Stage, gpu: type[Sms]) -> None:
    side = SIDES[stage](with_driver(setup, driver="mps-static"), Tools())
    assert told(setup, stage) == Driven("mps-static", "by affinity", 132, ())
    assert side._driver.layout == Indivisible(132)
    Cell(Path(setup.cell)).announce(24, NS_PER_S)
    assert side.begin() == 0
    side._driver.close()
