"""Costs of a model on devices of one kind, from kernels: measured ones or the roofline's."""

from collections.abc import Sequence
from functools import cache

from easerve.costs.base import Costs, Forward, Media
from easerve.costs.encoding import EncoderCosts
from easerve.costs.hardware import Hardware
from easerve.costs.language import LanguageCosts
from easerve.costs.models import ModelSpec
from easerve.costs.parts import Kernels, Knobs, Parts, pace


class LayerCosts(Costs):
    """``language`` and ``encoder``: where the times of their kernels are from.

    Raises ConfigError if the model cannot be divided by ``tp``.
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: Hardware,
        tp: int,
        knobs: Knobs,
        language: Kernels,
        encoder: Kernels,
    ) -> None:
        self._pace = cache(lambda share: pace(share, knobs))
        self._language = LanguageCosts(model.language, hardware, tp, language, knobs)
        self._encoder = EncoderCosts(model.encoder, hardware, encoder)
        self._encode_scale = knobs.encode_scale
        self._model, self._tp = model.language, tp
        self._setup_s = knobs.transfer_setup_s + hardware.link.latency.si
        given = knobs.link_gbytes_per_s
        self._link_bytes_per_s = given * 1e9 if given else hardware.link.bandwidth.si

    def encode(self, items: Sequence[Media], share: float = 1.0) -> float:
        return sum(self.encode_parts(items, share))

    def encode_parts(self, items: Sequence[Media], share: float = 1.0) -> Parts:
        """The time of an encoder forward, in parts; 0 of no items."""
        parts = self._encoder.parts(items, self._pace(share)) if items else Parts()
        return Parts(*(self._encode_scale * part for part in parts))

    def forward(self, step: Forward, share: float = 1.0) -> float:
        return self._language.seconds(step, self._pace(share))

    def parts(self, step: Forward, share: float = 1.0) -> Parts:
        """The time of a step, in parts; 0 of a step without tokens."""
        return self._language.parts(step, self._pace(share))

    def embedding_transfer(self, num_tokens: int) -> float:
        """One copy, over the encoder's link."""
        num_bytes = num_tokens * self._model.embedding_bytes_per_token
        return self._setup_s + num_bytes / self._link_bytes_per_s

    def kv_transfer(self, num_tokens: int) -> float:
        """Each device sends its part over its own link, at the same time."""
        num_bytes = self._model.kv_bytes(num_tokens) / self._tp
        return self._setup_s + num_bytes / self._link_bytes_per_s
