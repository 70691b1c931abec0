"""What a scenario's keys cannot mean on its hardware, or with what its seconds come from.

A key that would do nothing is an error: its file would say something that is not so.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from easerve.config import PARTITION_KNOBS, ConfigError
from easerve.costs import hardware
from easerve.costs.build import Knobs
from easerve.costs.hardware import Hardware
from easerve.policy.partition import Layout
from easerve.sim.config import EaserveSystem
from easerve.sim.scenario import Scenario

RULES_OF_A_PARTITION = ("static", "gate")
OF_OTHER_COSTS: Mapping[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "step_overhead_s": (None,),
}
"""Keys of engines that a profile knows nothing of, and what they may be all the same."""


def check(scenario: Scenario) -> None:
    """Raises ConfigError, which names the keys."""
    device = hardware.read(scenario.hardware)
    found = []
    config = scenario.configs.get("easerve")
    if isinstance(config, EaserveSystem):
        found += [f"systems.easerve.{each}" for each in _partition(config, device)]
    if scenario.costs.source == "profile":
        found += _profile(scenario)
    if found:
        raise ConfigError("\n".join(found))


def _partition(config: EaserveSystem, device: Hardware) -> Iterator[str]:
    local, partition, policy = config.local_prefill, config.partition, config.policy
    if device.kind == "cpu":
        if partition is not None:
            yield f"partition: {device.title}: all engines share the cores; leave it out"
        if local is not None and "crowding" in local.model_fields_set:
            yield f"local_prefill.crowding: {device.title}: all engines share the cores"
        return
    if partition is None:
        yield from _without_partition(config)
        return
    units, granule = device.num_units, device.num_granule
    least = partition.min_prefill_units or granule
    parts = Layout(units, granule, least).parts
    if not parts:
        most = units - granule
        yield f"partition.min_prefill_units {least}: it can be 1 to {most} of {units} units"
    elif policy.encode_units is not None and policy.encode_units > parts[-1]:
        yield (
            f"policy.encode_units {policy.encode_units}: it can be 1 to {parts[-1]} of {units} "
            f"units, as local prefill keeps {least}"
        )


def _without_partition(config: EaserveSystem) -> Iterator[str]:
    """``partition: null`` takes away a base's, whose rule then says nothing; others must not."""
    given = config.policy.model_fields_set & PARTITION_KNOBS
    if "partition" in config.model_fields_set:
        given = {
            name
            for name in given
            if name == "encode_units" or config.policy.how in RULES_OF_A_PARTITION
        }
    for name in sorted(given):
        if name != "how" or config.policy.how != "none":
            yield (
                f"policy.{name} needs a section partition: without it encode and local prefill "
                "share all of their device"
            )


def _profile(scenario: Scenario) -> Iterator[str]:
    """Seconds are those of the engines that were measured."""
    default = Knobs()
    for name, value in scenario.costs.knobs:
        if value != getattr(default, name):
            yield f"costs.knobs.{name} {value}: costs.source profile has no such factor"
    for system, config in scenario.configs.items():
        for path, value in _given(config, f"systems.{system}"):
            usual = OF_OTHER_COSTS.get(path.rpartition(".")[2])
            if usual is not None and value not in usual:
                yield (
                    f"{path} {value}: with costs.source profile an engine is the one that was "
                    f"measured; leave it out"
                )


def _given(section: BaseModel, path: str) -> Iterator[tuple[str, Any]]:
    """The keys that a file gives, those of sections within as well."""
    for name in sorted(section.model_fields_set):
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _given(value, f"{path}.{name}")
        else:
            yield f"{path}.{name}", value
