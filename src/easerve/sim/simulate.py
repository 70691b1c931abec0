"""One run of one system of a scenario."""

from functools import lru_cache
from pathlib import Path
from random import Random

from easerve.config import ConfigError
from easerve.costs import build, hardware, memory, models, profiled
from easerve.costs.base import Costs
from easerve.sim import clock, load
from easerve.sim.config import EaserveSystem
from easerve.sim.host import Host, NoHost
from easerve.sim.run import Run
from easerve.sim.scenario import Scenario
from easerve.sim.sharing import machine
from easerve.sim.systems import easerve
from easerve.sim.systems.registry import BUILDERS, Baseline
from easerve.sim.systems.served import Failure, Observe, Served
from easerve.sim.world import CostsOf, World
from easerve.types import WorkerId


def simulate(
    scenario: Scenario, system: str, traced: bool = False, observe: Observe | None = None
) -> Run:
    """``traced``: keep every piece of work. ``observe``: is told of every step of our core.

    Raises ConfigError, also when the engines of a system wait for each other.
    """
    world, config = make_world(scenario, Run(traced)), scenario.configs[system]
    built: Served | Baseline
    if isinstance(config, EaserveSystem):
        failures = [
            Failure(WorkerId(each.worker), each.at_s, each.back_s) for each in scenario.failures
        ]
        config = config.seeded(scenario.workload.seed)
        built = easerve.build(config, world, failures, observe)
    elif scenario.failures:
        raise ConfigError(
            f"failures: they are of workers of system easerve, and system {system} cannot have "
            "any: ask for system easerve alone, or --set failures=[]"
        )
    else:
        built = BUILDERS[system](config, world)
    return finished(built, world, system)


def finished(system: Served | Baseline, world: World, name: str) -> Run:
    """What comes of a system in its world. Raises ConfigError when it stands still."""
    clock.run(system, system.start())
    run = world.run
    if len(run.records) < len(world.requests):
        raise ConfigError(
            f"system {name} stands still: {len(world.requests) - len(run.records)} of "
            f"{len(world.requests)} requests do not end, as engines wait for each other"
        )
    run.end_s = max((record.end_s or 0.0 for record in run.records), default=0.0)
    return run


def make_world(scenario: Scenario, run: Run) -> World:
    """What the systems of a scenario are built of. Raises ConfigError."""
    model, device = _model(scenario.model), _device(scenario.hardware)
    encoder_bytes = model.encoder.weight_bytes

    def kv_tokens(
        tp: int, utilization: float, with_encoder: bool, with_activations: bool = True
    ) -> int:
        return memory.kv_tokens(
            model.language,
            device,
            tp,
            utilization=utilization,
            other_bytes=encoder_bytes if with_encoder else 0,
            activation_bytes=memory.ACTIVATION_BYTES if with_activations else 0,
        )

    cpu, host = None, NoHost()
    if device.kind == "cpu":
        cpu = machine(device.num_units)
        if scenario.costs.profile is not None:
            _, stages = _profile(Path(scenario.costs.profile))
            times = profiled.host_of(stages)
            cpu = machine(device.num_units - times.idle_cores)
            host = Host(times, cpu)
    return World(
        _costs_of(scenario),
        kv_tokens,
        device.num_units,
        device.num_granule,
        load.requests(scenario.workload, model),
        run,
        Random(f"{scenario.workload.seed}:system"),  # noqa: S311 (routing, not secrets)
        cpu,
        host,
    )


def _costs_of(scenario: Scenario) -> CostsOf:
    costs = scenario.costs
    if costs.source == "profile":
        assert costs.profile is not None, "the scenario has been checked"
        profile = profiled.costs_from(*_profile(Path(costs.profile)))
        return lambda tp, step_overhead_s=None: profile

    def costs_of(tp: int, step_overhead_s: float | None = None) -> Costs:
        over = {} if step_overhead_s is None else {"step_overhead_s": step_overhead_s}
        assert costs.source != "profile"
        return _built(
            scenario.model, scenario.hardware, tp, costs.source, costs.knobs.model_copy(update=over)
        )

    return costs_of


@lru_cache
def _built(model: str, device: str, tp: int, source: build.Source, knobs: build.Knobs) -> Costs:
    return build.costs(_model(model), _device(device), tp, source, knobs)


# Read once in a process: it takes as long as a tenth of a run.
_model, _device = lru_cache(models.read), lru_cache(hardware.read)
_profile = lru_cache(profiled.read)
