"""The costs of a model on a kind of device, by where their seconds come from."""

from typing import Literal, assert_never

from easerve.costs.analytic import RooflineCosts
from easerve.costs.hardware import Hardware
from easerve.costs.layers import LayerCosts
from easerve.costs.measured import KernelCosts
from easerve.costs.models import ModelSpec
from easerve.costs.parts import Knobs

__all__ = ["Knobs", "Source", "costs"]

Source = Literal["measured", "roofline"]


def costs(
    model: ModelSpec,
    hardware: Hardware,
    tp: int,
    source: Source = "measured",
    knobs: Knobs | None = None,
) -> LayerCosts:
    """``tp``: devices that share the language model. ``knobs`` None: the untuned model.

    Raises ConfigError if kernels of this device are not measured, if the model cannot be divided
    by ``tp``, or if all-reduce between so many devices is not known.
    """
    knobs = knobs or Knobs()
    match source:
        case "measured":
            return KernelCosts(model, hardware, tp, knobs)
        case "roofline":
            return RooflineCosts(model, hardware, tp, knobs)
        case _:
            assert_never(source)
