"""Machines that nobody has, for tests of the enumeration."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from easerve.config import GIB, Deployment, build
from easerve.engines.vllm.models import ModelInfo
from easerve.search.machine import Machine, of_scenario
from easerve.sim import scenario as scenarios
from easerve.sim.scenario import Scenario
from easerve.types import Stage

SCENARIOS = Path(__file__).parents[2] / "scenarios"
# As LLaVA-NeXT 34B in 16 bit.
INFO = ModelInfo(
    architecture="LlavaNextForConditionalGeneration",
    encoder_bytes=GIB // 2,
    language_bytes=64 * GIB,
    kv_bytes_per_token=2 * 60 * 8 * 128 * 2,
)


class Links:
    """A driver: so many GPUs, and pairs of them, the lower first, that NVLink joins."""

    def __init__(self, num_gpus: int, links: Iterable[tuple[int, int]] = ()) -> None:
        self._num_gpus, self._links = num_gpus, set(links)

    def num_gpus(self) -> int:
        return self._num_gpus

    def are_linked(self, one: int, other: int) -> bool:
        return (min(one, other), max(one, other)) in self._links


class Sizes:
    """Engines fit from so many devices on: of prefill, of decode, of prefill beside encoders."""

    def __init__(self, prefill: int = 1, decode: int = 1, beside: int = 1) -> None:
        self._least = {Stage.ENCODE: 1, Stage.PREFILL: prefill, Stage.DECODE: decode}
        self._beside = beside

    def __call__(self, stage: Stage, tp: int, beside: bool) -> str | None:
        least = self._beside if beside else self._least[stage]
        return None if tp >= least else f"needs {least}"


def made(num_devices: int, sizes: Sizes | None = None, **given: Any) -> Machine:
    return Machine("test", tuple(range(num_devices)), sizes or Sizes(), **given)


def scenario_of(name: str, changes: Mapping[str, Any] | None = None) -> Scenario:
    content = scenarios.read_content(SCENARIOS / f"{name}.yaml")
    bare: dict[str, Any] = {"experiment": None, "anchors": []}
    return scenarios.build(scenarios.laid(content, bare | dict(changes or {})), name)


def simulated(name: str, changes: Mapping[str, Any] | None = None) -> Machine:
    return of_scenario(scenario_of(name, changes))


def on_gpus(**content: Any) -> Deployment:
    given = {"model": "acme/m", "device": "cuda", "gpu_memory": "48GiB", **content}
    return build(given, "test")
