"""Kernels by the roofline: the longer one of computing and moving, each below its peak.

How far below is said by ``efficiency`` in a device's file. Where no kernels are measured this is
all there is, and it fills in for tables that a device lacks.
"""

from collections.abc import Sequence

from easerve.config import ConfigError
from easerve.costs.hardware import Hardware
from easerve.costs.kernels import Curve, Shape, causal_pairs, total
from easerve.costs.layers import LayerCosts
from easerve.costs.models import ModelSpec
from easerve.costs.parts import Attention, Kernels, Knobs, Product

MOST_BYTES = 1 << 40  # of a message, up to which its time is exact


class Roofline(Kernels):
    """``value_bytes``: of a weight, of an activation. ``products_share``: of the peak, in them."""

    def __init__(self, hardware: Hardware, value_bytes: int, products_share: float) -> None:
        self._hardware = hardware
        self._value_bytes = value_bytes
        self._products_rate = hardware.flops.si * products_share
        self._memory_rate = hardware.bandwidth.si * hardware.efficiency.memory.si

    def products(self, shapes: Sequence[tuple[int, Shape]]) -> Product:
        curves = [(times, self._product(shape)) for times, shape in shapes]
        weights = sum(times * inputs * outputs for times, (inputs, outputs) in shapes)
        return Product(total(curves), Curve([(0, 0), (1, 2 * weights / self._products_rate)]))

    def _product(self, shape: Shape) -> Curve:
        """A row's computing meets its moving where the weights are paid for."""
        inputs, outputs = shape
        row_s = 2 * inputs * outputs / self._products_rate
        weights_s = inputs * outputs * self._value_bytes / self._memory_rate
        moved_s = (inputs + outputs) * self._value_bytes / self._memory_rate
        if row_s <= moved_s:  # never bound by computing
            return Curve([(1, weights_s + moved_s), (1e9, weights_s + 1e9 * moved_s)])
        ridge = weights_s / (row_s - moved_s)
        if ridge <= 1:
            return Curve([(1, row_s)])
        return Curve([(1, weights_s + moved_s), (ridge, ridge * row_s)])

    def causal(self, head_dim: int, heads_per_kv: float) -> Attention:
        pair_s = self._pair_s(head_dim, self._hardware.efficiency.attention.si)
        return lambda heads, length: heads * causal_pairs(length) * pair_s

    def generation(self, head_dim: int, heads_per_kv: float) -> Attention:
        token_s = 2 * head_dim * self._value_bytes / self._memory_rate
        return lambda heads, context: heads * context * token_s

    def unmasked(self, head_dim: int) -> Attention:
        pair_s = self._pair_s(head_dim, self._hardware.efficiency.encoder.si)
        return lambda heads, length: heads * length * length * pair_s

    def all_reduce(self, num_devices: int) -> Curve:
        known = self._hardware.all_reduce
        if num_devices not in known:
            legal = ", ".join(map(str, sorted({1, *known})))
            raise ConfigError(
                f"tensor_parallel_size {num_devices}: of {self._hardware.title} all-reduce is "
                f"known for {legal}"
            )
        way = known[num_devices]
        byte_s = 2 * (num_devices - 1) / num_devices / way.bandwidth.si
        latency = way.latency.si
        return Curve([(1, latency + byte_s), (MOST_BYTES, latency + MOST_BYTES * byte_s)])

    def _pair_s(self, head_dim: int, efficiency: float) -> float:
        return 4 * head_dim / (self._hardware.flops.si * efficiency)


class RooflineCosts(LayerCosts):
    """Raises ConfigError if the model cannot be divided by ``tp``, or ``tp`` is not known."""

    def __init__(self, model: ModelSpec, hardware: Hardware, tp: int, knobs: Knobs) -> None:
        shares = hardware.efficiency
        language = Roofline(hardware, model.language.value_bytes, shares.gemm.si)
        encoder = Roofline(hardware, model.encoder.value_bytes, shares.encoder.si)
        super().__init__(model, hardware, tp, knobs, language, encoder)
