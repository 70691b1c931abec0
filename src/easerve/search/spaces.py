"""Spaces by name: which knobs are searched, and the values that they may have.

``paper``: what the paper searches, GPUs of each stage, encode batch and remote share. ``full``: the
rules as well, with their knobs, and decode slots. A knob may be given other values, or one value,
which fixes it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from easerve.config import ConfigError, Policy
from easerve.search.space import SHARE, Allocation, Knob, Space, Value

SHARES: tuple[float, ...] = tuple(round(step / 20, 2) for step in range(1, 21))
BATCHES = (1, 2, 4, 8, 16, 32)
FEW_BATCHES = (1, 4, 16)
"""For a grid of which everything is tried: neighbours differ by little."""
OFFLOADS = SHARES[:-1]


def _rules(key: str, but: Sequence[str] = ()) -> tuple[str, ...]:
    """Of a policy, by name, as the deployment file has them."""
    known = get_args(Policy.model_fields[key].annotation)
    return tuple(each for each in known if each not in but)


def _paper() -> list[Knob]:
    return [Knob("policy.max_batch_items", FEW_BATCHES), Knob(SHARE, SHARES)]


def _full() -> list[Knob]:
    """Without rules that are there to compare with, and without those that ``gap`` contains."""
    return [
        Knob("policy.max_batch_items", BATCHES),
        Knob(SHARE, SHARES),
        Knob("policy.when", _rules("when", but=["none", "fill"])),
        Knob("policy.gap_k", (0.25, 0.5, 1.0, 2.0), ("policy.when", ("gap", "slack"))),
        Knob("policy.timeout_s", (0.01, 0.05, 0.2), ("policy.when", ("fixed",))),
        Knob("policy.where", _rules("where", but=["bernoulli"]), (SHARE, OFFLOADS)),
        Knob("policy.how", _rules("how"), (SHARE, OFFLOADS)),
        Knob("decode.max_num_seqs", (32, 64, 128, 256)),
    ]


SPACES: Mapping[str, Callable[[], list[Knob]]] = {"paper": _paper, "full": _full}
PARTITION_KNOBS = ("policy.how",)


def space(
    name: str, allocations: Sequence[Allocation], given: Mapping[str, Sequence[Value]]
) -> Space:
    """``given``: other values of knobs, by the path of the key; a knob that the space does not have
    is added. Raises ConfigError for a name that is none.

    Knobs of a partition are left out where no allocation can have one.
    """
    if name not in SPACES:
        raise ConfigError(f"--space: {name!r} is none of {', '.join(SPACES)}")
    knobs = [
        replace(knob, values=tuple(given.get(knob.path, knob.values))) for knob in SPACES[name]()
    ]
    own = {knob.path for knob in knobs}
    knobs += [Knob(path, tuple(values)) for path, values in given.items() if path not in own]
    if not any((each.offload or {}).get("partition") is not None for each in allocations):
        knobs = [knob for knob in knobs if knob.path not in PARTITION_KNOBS]
    return Space(allocations, knobs)
