"""Costs from measured kernels, by interpolation between the points of a device's tables.

What no table has is filled in by the roofline: the attention of heads of a size that was not
measured, an encoder's on an A100. All-reduce is vLLM's own where vLLM uses it, else NCCL's.
"""

from collections.abc import Sequence

from easerve.config import ConfigError
from easerve.costs.analytic import Roofline
from easerve.costs.hardware import Hardware, Link
from easerve.costs.kernels import (
    VALUE_BYTES,
    Curve,
    Products,
    Shape,
    Table,
    all_reduce,
    causal,
    generation,
    least_per_x,
    table,
    total,
    unmasked,
)
from easerve.costs.layers import LayerCosts
from easerve.costs.models import ModelSpec
from easerve.costs.parts import Attention, Kernels, Knobs, Product, memory_rate

CUSTOM_DEVICES = (2, 4, 6, 8)


class Tables(Kernels):
    """Raises ConfigError if no kernels were measured for the device."""

    def __init__(self, hardware: Hardware) -> None:
        if hardware.kernels is None:
            raise ConfigError(
                f"{hardware.title}: no measured kernels; costs.source can be roofline or profile"
            )
        self._hardware = hardware
        self._device = hardware.kernels.table
        self._scale = hardware.kernels.memory_scale
        self._products = Products(self._table("gemm"))
        self._roofline = Roofline(hardware, VALUE_BYTES, hardware.efficiency.gemm.si)

    def products(self, shapes: Sequence[tuple[int, Shape]]) -> Product:
        """Of a time, the part that its bytes would take is bound by memory, the rest by computing.

        The first gets shorter by ``memory_scale``. Where the bytes take all of the time, computing
        is as long as at the throughput of the best point.
        """
        seconds, computing = [], []
        for times, shape in shapes:
            curve = self._products.curve(shape)
            row_s = least_per_x(curve)
            bound = [(x, y, min(1.0, self._moving_s(shape, x) / y)) for x, y in curve.points()]
            scaled = Curve((x, y * (1 - (1 - self._scale) * part)) for x, y, part in bound)
            alone = Curve((x, y * (1 - part) + x * row_s * part) for x, y, part in bound)
            seconds.append((times, scaled))
            computing.append((times, alone))
        return Product(total(seconds), total(computing))

    def _moving_s(self, shape: Shape, rows: float) -> float:
        """Of the weights and activations, on the device that was measured."""
        inputs, outputs = shape
        values = inputs * outputs + rows * (inputs + outputs)
        return VALUE_BYTES * values / memory_rate(self._hardware) / self._scale

    def causal(self, head_dim: int, heads_per_kv: float) -> Attention:
        plane = causal(self._table("context"), head_dim, heads_per_kv)
        return plane or self._roofline.causal(head_dim, heads_per_kv)

    def generation(self, head_dim: int, heads_per_kv: float) -> Attention:
        cache_bytes = self._hardware.cache.si
        known = self._table("generation")
        plane = generation(known, head_dim, heads_per_kv, cache_bytes, self._scale)
        return plane or self._roofline.generation(head_dim, heads_per_kv)

    def unmasked(self, head_dim: int) -> Attention:
        known = table(self._device, "encoder")
        plane = unmasked(known, head_dim) if known is not None else None
        return plane or self._roofline.unmasked(head_dim)

    def all_reduce(self, num_devices: int) -> Curve:
        own = uses_custom_all_reduce(self._hardware.link, num_devices)
        curve = all_reduce(self._table("allreduce"), num_devices, own)
        return self._roofline.all_reduce(num_devices) if curve is None else curve

    def _table(self, kind: str) -> Table:
        known = table(self._device, kind)
        assert known is not None  # tests read each of them
        return known


class KernelCosts(LayerCosts):
    """Raises ConfigError if nothing is measured, or the model cannot be divided by ``tp``."""

    def __init__(self, model: ModelSpec, hardware: Hardware, tp: int, knobs: Knobs) -> None:
        for part in (model.language, model.encoder):
            if part.value_bytes != VALUE_BYTES:
                raise ConfigError(
                    f"{model.title}: measured kernels are of bfloat16, not of "
                    f"{part.value_bytes} bytes a value; costs.source can be roofline or profile"
                )
        kernels = Tables(hardware)
        super().__init__(model, hardware, tp, knobs, kernels, kernels)


def uses_custom_all_reduce(link: Link, num_devices: int) -> bool:
    """vLLM 0.32's rule (custom_all_reduce.py): peers read each other's memory, and without NVLink
    between all of them there are two at most. How large a message may be is said by the kernels.
    """
    return num_devices in CUSTOM_DEVICES and link.peer_to_peer and (link.nvlink or num_devices == 2)
