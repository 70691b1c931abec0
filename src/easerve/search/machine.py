"""What an enumeration of allocations has to know of a machine and a model.

Of a simulated machine the scenario and its costs tell it; of this machine the driver tells it, and
the memory plan that ``easerve serve`` checks. On a CPU engines share the cores: a "device" is then
an engine, and there are as many as are asked for and the host's memory allows.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from easerve.config import ConfigError, Deployment
from easerve.costs import hardware, models
from easerve.costs.hardware import Hardware
from easerve.costs.memory import ACTIVATION_BYTES
from easerve.costs.models import ModelSpec
from easerve.engines.vllm import memory
from easerve.engines.vllm import models as folders
from easerve.engines.vllm.models import ModelInfo
from easerve.search.links import Driver, Nvml, islands
from easerve.search.planned import STAGES, Planned, indivisible, text_config, too_small
from easerve.sim.config import EaserveSystem, LlmEngines
from easerve.sim.run import Run
from easerve.sim.scenario import Scenario
from easerve.sim.simulate import make_world
from easerve.sim.world import World
from easerve.types import Stage

SPARE_ENGINES = 2
"""On a CPU, beyond its cores: engines of one request's stages rarely run all at once."""


class Refuses(Protocol):
    def __call__(self, stage: Stage, tp: int, beside: bool) -> str | None:
        """Why an engine of that stage on ``tp`` devices cannot be; None: it can.

        ``beside``: a prefill engine on the devices of ``tp`` encoders, a device of each.
        """
        ...


class RefusesAll(Protocol):
    def __call__(self, encoders: int, prefills: int, decodes: int, offload: bool) -> str | None:
        """Why so many engines cannot be together; None: they can. ``offload``: with a prefill
        engine beside each encoder.
        """
        ...


def all_together(encoders: int, prefills: int, decodes: int, offload: bool) -> str | None:
    """Engines with devices of their own do not disturb each other."""
    return None


@dataclass(frozen=True, slots=True)
class Machine:
    """``devices``: their numbers. ``islands``: groups of them that NVLink joins, each with each;
    none where PCIe is all there is. ``prefill_s``: of a prefill by the number of its devices, None
    where nobody knows. ``shares_cores``: devices are engines of a CPU. ``names_devices``: the keys
    ``devices`` of a deployment file say where engines are. ``fixed``: changes that hold with every
    allocation, as what a file says does not go with another number of engines.
    """

    title: str
    devices: tuple[int, ...]
    refuses: Refuses
    islands: tuple[tuple[int, ...], ...] = ()
    prefill_s: Callable[[int], float] | None = None
    shares_cores: bool = False
    refuses_all: RefusesAll = all_together
    names_devices: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tps(self) -> tuple[int, ...]:
        """Degrees of tensor parallelism that are looked at; ``refuses`` says which are none."""
        if self.shares_cores:
            return (1,)
        return tuple(1 << power for power in range(len(self.devices).bit_length()))


# A simulated machine ------------------------------------------------------------------------------


def of_scenario(scenario: Scenario) -> Machine:
    """The GPUs of a scenario, and its largest request. Raises ConfigError."""
    system = scenario.configs.get("easerve")
    if not isinstance(system, EaserveSystem):
        raise ConfigError("the scenario has no section systems.easerve, so nothing to allocate")
    device, model = hardware.read(scenario.hardware), models.read(scenario.model)
    world = make_world(scenario, Run())
    modelled = _Modelled(model, device, system, world, scenario.costs.source == "profile")
    devices = tuple(range(scenario.num_gpus))
    if device.kind == "cpu":
        title = f"{len(devices)} engines on {device.title}"
        return Machine(title, devices, cache(modelled.refuses), shares_cores=True)
    return Machine(
        f"{len(devices)} × {device.title}",
        devices,
        cache(modelled.refuses),
        (devices,) if device.link.nvlink else (),
        cache(modelled.prefill_s),
    )


@dataclass(frozen=True, slots=True)
class _Modelled:
    """``is_measured``: costs are a profile's, of the very engine that was measured."""

    model: ModelSpec
    device: Hardware
    system: EaserveSystem
    world: World
    is_measured: bool

    def refuses(self, stage: Stage, tp: int, beside: bool) -> str | None:
        if stage is Stage.ENCODE:
            return self._encoder_refused()
        language = self.model.language
        if self.is_measured and tp > 1:
            return "the costs are a profile's, of engines on one device"
        if why := indivisible(language.num_heads, language.num_kv_heads, tp):
            return why
        try:
            self.world.costs_of(tp)
            return too_small(self._kv_tokens(stage, tp, beside), self._largest)
        except ConfigError as error:
            return str(error)

    def _encoder_refused(self) -> str | None:
        needed = self.model.encoder.weight_bytes + ACTIVATION_BYTES
        had = LlmEngines().gpu_memory_utilization * self.device.memory.si
        if needed <= had:
            return None
        return f"an encoder needs {needed / 1e9:.1f} GB of {had / 1e9:.1f} GB"

    def _kv_tokens(self, stage: Stage, tp: int, beside: bool) -> int:
        section = self.system.decode if stage is Stage.DECODE else self.system.prefill
        there = self.world.kv_tokens(tp, section.gpu_memory_utilization, beside)
        local = self.system.local_prefill
        given = (local and local.kv_cache_tokens) if beside else section.kv_cache_tokens
        return min(there, given or there)

    @property
    def _largest(self) -> int:
        """Tokens of a prompt and its answer."""
        sizes = (each.num_prompt_tokens + each.num_tokens for each in self.world.requests)
        return max(sizes, default=1)

    def prefill_s(self, tp: int) -> float:
        """Of the longest prompt, or of as much of it as a step takes. Raises ConfigError."""
        longest = max((each.num_prompt_tokens for each in self.world.requests), default=1)
        section = self.system.prefill
        costs = self.world.costs_of(tp, section.step_overhead_s)
        return costs.prefill(min(longest, section.max_num_batched_tokens))


# This machine -------------------------------------------------------------------------------------


def of_deployment(
    deployment: Deployment,
    *,
    info: ModelInfo | None = None,
    max_tokens: int | None = None,
    max_engines: int | None = None,
    gpus: Sequence[int] | None = None,
    driver: Driver | None = None,
) -> Machine:
    """This machine, for the model of a deployment file.

    ``max_tokens``: of the largest request; vLLM besides wants a KV cache for the longest one that
    the model, or ``engine.max_model_len``, allows. ``max_engines``: on a CPU, without those beside
    encoders. ``gpus``: those to use; None: all. Raises ConfigError.
    """
    planned = Planned(
        deployment.model_dump(exclude_unset=True),
        info or folders.inspect(deployment.model),
        text_config(deployment.model),
        max(max_tokens or 1, deployment.engine.max_model_len or 0),
        deployment.engine.max_model_len is None,
    )
    if deployment.device == "cpu":
        return _cpu(planned, max_engines)
    return _gpus(planned, gpus, driver)


def _cpu(planned: Planned, max_engines: int | None) -> Machine:
    num_cores = len(os.sched_getaffinity(0))
    num = max_engines or num_cores + SPARE_ENGINES
    named = [stage for stage in STAGES if (planned.content.get(stage) or {}).get("cores")]
    return Machine(
        f"{num} engines on a CPU of {num_cores} cores",
        tuple(range(num)),
        cache(planned.refuses),
        shares_cores=True,
        refuses_all=planned.refuses_all,
        fixed={f"{stage}.cores": None for stage in named},
    )


def _gpus(planned: Planned, gpus: Sequence[int] | None, driver: Driver | None) -> Machine:
    driver = driver or Nvml()
    num = driver.num_gpus()
    used = tuple(range(num)) if gpus is None else tuple(gpus)
    if strange := sorted(set(used) - set(range(num))):
        raise ConfigError(f"GPUs {strange}: this machine has {num}")
    gpu_bytes = planned.content.get("gpu_memory") or memory.detect_gpu_bytes()
    if gpu_bytes is None:
        raise ConfigError("the memory of a GPU is not known; set gpu_memory")
    if planned.info.language_bytes is None:
        raise ConfigError(
            f"model {planned.content['model']!r}: its weights are not on this machine, so what "
            "fits is not known; download the model first"
        )
    planned.content["gpu_memory"] = gpu_bytes
    fixed = {} if "encode" not in planned.content else {"encode.tensor_parallel_size": 1}
    title = f"{len(used)} GPUs of {memory.gib(int(gpu_bytes))}"
    return Machine(
        title,
        used,
        cache(planned.refuses),
        islands(driver, used),
        names_devices=True,
        fixed=fixed,
    )
