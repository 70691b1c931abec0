"""Spaces by name: which knobs are searched, and the values that they may have.

``paper``: what the paper searches, GPUs of each stage, encode batch and remote share. ``full``: the
rules as well, with their knobs, and decode slots. A knob may be given other values, or one value,
which fixes it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from easerve.config import ConfigError, Policy
from easerve.search.space import SHARE, Allocation, Knob, Space, Value

SHARES: tuple[float, ...] = tuple(round(step / 20, 2) for step in range(1, 21))
BATCHES = (1, 2, 4, 8, 16, 32)
FEW_BATCHES = (1, 4, 16)
"""For a grid of which everything is tried: neighbours differ by little."""


def _rules(key: str, but: Sequence[str] = ()) -> tuple[str, ...]:
    """Of a policy, by name, as the deployment file has them."""
    known = get_args(Policy.model_fields[key].annotation)
    return tuple(each for each in known if each not in but)


def _paper(shares: Sequence[Value]) -> list[Knob]:
    return [Knob("policy.max_batch_items", FEW_BATCHES), Knob(SHARE, tuple(shares))]


def _full(shares: Sequence[Value]) -> list[Knob]:
    """Without rules that are there to compare with, and without those that ``gap`` contains."""
    offloads = tuple(each for each in shares if each != 1)
    return [
        Knob("policy.max_batch_items", BATCHES),
        Knob(SHARE, tuple(shares)),
        Knob("policy.when", _rules("when", but=["none", "fill"])),
        Knob("policy.gap_k", (0.25, 0.5, 1.0, 2.0), ("policy.when", ("gap", "slack"))),
        Knob("policy.timeout_s", (0.01, 0.05, 0.2), ("policy.when", ("fixed",))),
        Knob("policy.where", _rules("where", but=["bernoulli"]), (SHARE, offloads)),
        Knob("policy.how", _rules("how"), (SHARE, offloads)),
        Knob("decode.max_num_seqs", (32, 64, 128, 256)),
    ]


SPACES: Mapping[str, Callable[[Sequence[Value]], list[Knob]]] = {"paper": _paper, "full": _full}
"""By name, of the remote shares."""
PARTITION_KNOBS = ("policy.how",)
OF_ALLOCATIONS = re.compile(
    r"(encode|prefill|decode|local_prefill)\.(replicas|tensor_parallel_size|devices|cores)"
)
"""Keys that are no knobs: what fits is known of an allocation as it is."""


def space(
    name: str, allocations: Sequence[Allocation], given: Mapping[str, Sequence[Value]]
) -> Space:
    """``given``: other values of knobs, by the path of the key; a knob that the space does not have
    is added. Raises ConfigError for a name that is none, and for what cannot be a knob here.

    Knobs of a partition are left out where no allocation can have one.
    """
    if name not in SPACES:
        raise ConfigError(f"--space: {name!r} is none of {', '.join(SPACES)}")
    for path in filter(OF_ALLOCATIONS.fullmatch, given):
        raise ConfigError(f"--knob {path}: allocations say it; it is no knob")
    knobs = [
        replace(knob, values=tuple(given.get(knob.path, knob.values)))
        for knob in SPACES[name](given.get(SHARE, SHARES))
    ]
    own = {knob.path for knob in knobs}
    knobs += [Knob(path, tuple(values)) for path, values in given.items() if path not in own]
    if not any((each.offload or {}).get("partition") is not None for each in allocations):
        for path in (path for path in given if path in PARTITION_KNOBS):
            raise ConfigError(f"--knob {path}: no allocation here can divide a device")
        knobs = [knob for knob in knobs if knob.path not in PARTITION_KNOBS]
    return Space(allocations, knobs)
