"""What the costs of a stage are made of: kernels, their bounds, and factors on them.

On a ``share`` of the units, work that is bound by computing takes 1 / share times as long, work
that is bound by memory max(1, knee / share) times; a product takes the longer one of the two.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from easerve.config import Section, Share
from easerve.costs.hardware import Hardware
from easerve.costs.kernels import Curve, Shape

Scale = Annotated[float, Field(gt=0, le=1000)]
Overhead = Annotated[float, Field(ge=0, le=1000)]
Attention = Callable[[float, float], float]  # seconds by heads of all sequences and by length


class Knobs(Section):
    """Named factors on costs; the untuned model is all defaults.

    ``step_overhead_s``: of the host, for each step of a language model (assumed).
    ``gemm_scale``, ``attention_scale``, ``all_reduce_scale``: on times of these kernels in the
    language model. ``encode_scale``: on a whole encoder forward. ``bandwidth_knee``: the share of
    the units that draws all of the memory's bandwidth (assumed). ``compute_elasticity``: work
    bound by computing takes share ** -elasticity as long; 1 is the roofline's.
    ``transfer_setup_s``: of each transfer, beside the link's latency (assumed).
    ``link_gbytes_per_s``: instead of the hardware's.
    """

    step_overhead_s: Overhead = 0.006
    gemm_scale: Scale = 1.0
    attention_scale: Scale = 1.0
    all_reduce_scale: Scale = 1.0
    encode_scale: Scale = 1.0
    bandwidth_knee: Share = 0.45
    compute_elasticity: Annotated[float, Field(ge=0, le=1)] = 1.0
    transfer_setup_s: Overhead = 0.002
    link_gbytes_per_s: Scale | None = None


class Product(NamedTuple):
    """Rows times matrices, by rows: how long it takes, and how much of that computing would."""

    seconds: Curve
    computing: Curve


class Kernels(ABC):
    """Seconds that kernels take on a whole device.

    Attention of whole prompts and of an encoder is bound by computing, that of decodes by memory.
    """

    @abstractmethod
    def products(self, shapes: Sequence[tuple[int, Shape]]) -> Product:
        """Of matrices, each so many times."""

    @abstractmethod
    def causal(self, head_dim: int, heads_per_kv: float) -> Attention:
        """Of whole prompts."""

    @abstractmethod
    def generation(self, head_dim: int, heads_per_kv: float) -> Attention:
        """Of one token for each sequence, by heads of the KV cache and by context."""

    @abstractmethod
    def unmasked(self, head_dim: int) -> Attention:
        """Of an encoder's sequences."""

    @abstractmethod
    def all_reduce(self, num_devices: int) -> Curve:
        """By bytes of a message. Raises ConfigError if nothing is known of so many devices."""


class Parts(NamedTuple):
    """Seconds of one forward, by what they are spent on."""

    gemm: float = 0.0
    attention: float = 0.0
    all_reduce: float = 0.0
    elementwise: float = 0.0
    logits: float = 0.0
    overhead: float = 0.0


class Pace(NamedTuple):
    """How many times as long work takes on a share of the units: bound by memory, by computing."""

    memory: float
    computing: float

    def of(self, product: Product, rows: float) -> float:
        """Seconds."""
        whole = product.seconds(rows)
        if self.computing == 1.0:
            return whole
        return max(whole * self.memory, product.computing(rows) * self.computing)


def pace(share: float, knobs: Knobs) -> Pace:
    """Raises ValueError if there is no such share."""
    if not 0 < share <= 1:
        raise ValueError(f"a share of the units is more than 0 and at most 1, not {share}")
    memory = max(1.0, knobs.bandwidth_knee / share)
    return Pace(memory, max(memory, share**-knobs.compute_elasticity))


def memory_rate(hardware: Hardware) -> float:
    """Bytes per second that operations on single values reach."""
    return hardware.bandwidth.si * hardware.efficiency.memory.si
