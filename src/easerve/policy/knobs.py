"""The knobs of the control policies: one frozen value, replaced as a whole while serving."""

from dataclasses import dataclass
from enum import StrEnum

NO_RULE = "none"
"""The rule that holds nothing back, whatever the credits."""


class Order(StrEnum):
    """Who is first in the encode queue."""

    FIFO = "fifo"
    DEADLINE = "deadline"
    """The earliest TTFT deadline; without an SLO, the earliest to time out."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """As ``config.Policy``, which says what each is and has the defaults.

    ``when`` is a name in ``batching.RULES``, ``where`` in ``share.RULES``, ``how`` in
    ``partition.RULES``.
    """

    when: str
    order: Order
    max_batch_items: int
    timeout_s: float
    gap_k: float
    encoder_value: float
    spread: bool
    run_ahead: int
    group_by_size: bool
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    flow: bool
    prefill_ahead_s: float
    max_queue_s: float
    where: str
    remote_share: float
    band_kappa: float
    offload_seed: int
    share_trim: bool
    spill_guard_s: float | None
    how: str
    encode_target_s: float
    encode_units: int | None
    adapt: bool
    adapt_period_s: float
    adapt_hold: int
    adapt_share: float
    adapt_factor: float
