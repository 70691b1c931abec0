"""What an allocation can do at most: requests per second, from the capacities of stages alone.

A deployment does no more than its slowest stage. Encode and decode do what their engines do.
Prefill has two sides, and the remote share decides which of them is full first; the side beside
the encoders is slowed by them, and slows them, the more the more requests there are. So the
highest rate that all stages keep up with is found by halving.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from easerve.goodput import Slo
from easerve.search.capacity import Capacities, Row, best, most_per_s
from easerve.search.space import Allocation
from easerve.types import Stage

CROWDING = 0.075
"""As ``sim.config.LocalPrefill``, for a machine of which nothing else is known."""
CALL_PART = 0.5
"""Of what prefill leaves of the TTFT promise; a request may wait as long for its call to begin."""
NUM_HALVINGS, MOST_PER_S = 40, 1e9
MACHINE = "machine"
TP, LOCAL = "tensor_parallel_size", "local_prefill"


class Lacking(Exception):
    """A stage cannot keep the promise at all; the text says which, and why."""


@dataclass(frozen=True, slots=True)
class Site:
    """What the capacities are used for. ``crowding``: how much longer encode and prefill each take
    beside the other. ``cores``: of a CPU that all engines share, each of which would keep one
    busy; None: engines have devices of their own.
    """

    capacities: Capacities
    slo: Slo
    crowding: float = CROWDING
    cores: float | None = None


@dataclass(frozen=True, slots=True)
class Engines:
    """Those of an allocation, what each group does alone in requests per second.

    ``encode_s``: for how long a request is at an encoder, over the number of encoders. ``ranks``:
    encoders that a local prefill engine shares its devices with. ``slower``: so many times as long
    takes what runs beside other work on its device. ``machine_per_s``: what the cores do that all
    share.
    """

    encode_per_s: float
    encode_s: float
    remote_per_s: float
    local_per_s: float
    decode_per_s: float
    ranks: int
    slower: float
    machine_per_s: float

    def most_per_s(self, share: float) -> float:
        """The highest rate that every stage keeps up with at this remote share."""
        return _highest(lambda rate: min(self.stages(rate, share).values()) >= rate)

    @property
    def balanced_share(self) -> float:
        """The remote share with which both sides of prefill are as busy as each other, at the
        highest rate that both together and the other stages keep up with; 1 without a local side.
        """
        if not self.local_per_s or math.isinf(self.remote_per_s):
            return 1.0
        others = min(self.encode_per_s, self.decode_per_s, self.machine_per_s)
        rate = _highest(lambda rate: min(others, self.remote_per_s + self.beside(rate)) >= rate)
        return self.remote_per_s / (self.remote_per_s + self.beside(rate))

    def stages(self, rate: float, share: float) -> dict[str, float]:
        """What each stage can do while ``rate`` requests come per second."""
        beside = self.beside(rate)
        # For so much of its time an encoder has prefill beside it.
        together = min(1.0, rate * (1 - share) / beside) if beside else 0.0
        sides = [(self.remote_per_s, share), (beside, 1 - share)]
        found = {
            str(Stage.ENCODE): self.encode_per_s / (1 + together * (self.slower - 1)),
            str(Stage.PREFILL): min(can / part for can, part in sides if part > 0),
            str(Stage.DECODE): self.decode_per_s,
        }
        return found | ({MACHINE: self.machine_per_s} if self.machine_per_s < math.inf else {})

    def beside(self, rate: float) -> float:
        """What local prefill does while encoders work for so many requests. It waits for the
        slowest of its ranks, so one encoder that has a call is enough to slow it.
        """
        idle = 1 - min(1.0, self.slower * rate * self.encode_s)
        return self.local_per_s * (1 - (1 - idle**self.ranks) * (1 - 1 / self.slower))


def _highest(keeps_up: Callable[[float], bool]) -> float:
    """Of the rates that are kept up with; infinite where all are."""
    low, high = 0.0, 1.0
    while keeps_up(high):
        low, high = high, 2 * high
        if low > MOST_PER_S:
            return math.inf
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return low


def engines(
    allocation: Allocation, site: Site, max_items: int | None = None, max_seqs: int | None = None
) -> Engines:
    """With batches of so many items and so many decode slots at most. Raises Lacking."""
    changes = allocation.changes
    local: Mapping[str, Any] | None = (allocation.offload or {}).get(LOCAL)
    local_tp = int(local.get(TP, 1)) if local is not None else 0
    row = encode_row(allocation, site, max_items)
    encode, encode_s = row.per_s, max(1 / row.per_s, row.seconds / row.batch)
    remote = prefill_row(tp_of(allocation, Stage.PREFILL), site).per_s
    beside = prefill_row(local_tp, site).per_s if local_tp else 0.0
    decode = _decode_per_s(tp_of(allocation, Stage.DECODE), site, max_seqs)
    num_encoders = int(changes.get("encode.replicas", 1))
    seconds = sum(1 / each for each in (encode, remote, decode))
    return Engines(
        num_encoders * encode,
        encode_s / num_encoders,
        int(changes.get("prefill.replicas", 1)) * remote,
        num_encoders // local_tp * beside if local_tp else 0.0,
        int(changes.get("decode.replicas", 1)) * decode,
        max(1, local_tp),
        2 * (1 + site.crowding),
        site.cores / seconds if site.cores is not None and seconds else math.inf,
    )


def tp_of(allocation: Allocation, stage: Stage) -> int:
    """Devices of each engine; where nothing is said of it, one."""
    return int(allocation.changes.get(f"{stage}.{TP}", 1))


def call_limit_s(allocation: Allocation, site: Site) -> float:
    """How long a call of an encoder may take. Raises Lacking."""
    prefill = prefill_row(tp_of(allocation, Stage.PREFILL), site)
    return CALL_PART * (_ttft_s(site) - prefill.seconds)


def encode_row(allocation: Allocation, site: Site, max_items: int | None = None) -> Row:
    """The best batch that is done within the limit. Raises Lacking."""
    rows, limit_s = site.capacities.rows(Stage.ENCODE, 1), call_limit_s(allocation, site)
    found = best(rows, limit_s, max_items)
    if found is None:
        why = (
            f"no batch is done in {limit_s:.3g} s, half of what prefill leaves of the TTFT promise"
        )
        raise Lacking(f"encode: {why if rows else 'nothing is known of it'}")
    return found


def prefill_row(tp: int, site: Site) -> Row:
    """Raises Lacking."""
    rows = site.capacities.rows(Stage.PREFILL, tp)
    found = best(rows, _ttft_s(site))
    if found is None:
        why = "no prompt is done within the TTFT promise" if rows else "nothing is known of it"
        raise Lacking(f"prefill on {tp}: {why}")
    return found


def _decode_per_s(tp: int, site: Site, max_seqs: int | None) -> float:
    rows = site.capacities.rows(Stage.DECODE, tp)
    found = most_per_s(rows, _tpot_s(site), max_seqs)
    if not found:
        why = "no step is as short as the TPOT promise" if rows else "nothing is known of it"
        raise Lacking(f"decode on {tp}: {why}")
    return found


def _ttft_s(site: Site) -> float:
    return math.inf if site.slo.ttft_s is None else site.slo.ttft_s


def _tpot_s(site: Site) -> float:
    return math.inf if site.slo.tpot_s is None else site.slo.tpot_s
