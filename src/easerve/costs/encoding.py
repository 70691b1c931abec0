"""An encoder forward, as a sum of kernels, over all sequences of all items at once.

Operations on single values are counted by their bytes: two norms and two residuals (14 vectors
read and written, with the copies of queries and keys), and the activation of the MLP.
"""

from collections.abc import Iterable, Sequence

from easerve.costs.base import Media
from easerve.costs.hardware import Hardware
from easerve.costs.models import Encoder
from easerve.costs.parts import Kernels, Pace, Parts, memory_rate


class EncoderCosts:
    """On one device; ``kernels``: where the times are from."""

    def __init__(self, encoder: Encoder, hardware: Hardware, kernels: Kernels) -> None:
        self._encoder = encoder
        layers = [(encoder.num_layers, shape) for shape in encoder.layer_matrices]
        self._layers = kernels.products(layers)
        self._patches = [kernels.products([(1, shape)]) for shape in encoder.patches]
        self._projector = kernels.products([(1, shape) for shape in encoder.projector])
        self._attention = kernels.unmasked(encoder.head_dim)
        self._num_window = encoder.num_layers - encoder.num_global_layers if encoder.window else 0
        self._num_global = encoder.num_layers - self._num_window
        mlp = encoder.intermediate * (3 if encoder.gated else 2)
        values = encoder.num_layers * (14 * encoder.hidden + mlp)
        self._token_s = values * encoder.value_bytes / memory_rate(hardware)

    def parts(self, items: Sequence[Media], pace: Pace) -> Parts:
        encoder = self._encoder
        sequences: dict[int, int] = {}
        for item in items:
            num = sequences.get(item.sequence_tokens, 0) + item.num_sequences
            sequences[item.sequence_tokens] = num
        lengths = sequences.items()
        tokens = sum(length * num for length, num in lengths)
        patches = sum((length - encoder.num_extra) * num for length, num in lengths)
        projected = sum(encoder.num_projected(length) * num for length, num in lengths)
        gemm = pace.of(self._layers, tokens) + pace.of(self._projector, projected)
        for product, per_token in zip(self._patches, encoder.patch_rows, strict=True):
            gemm += pace.of(product, patches * per_token)
        attention = self._num_global * self._layer(lengths)
        if encoder.window and self._num_window:
            attention += self._num_window * self._layer(_windows(lengths, encoder.window))
        elementwise = tokens * self._token_s * pace.memory
        return Parts(gemm, attention * pace.computing, elementwise=elementwise)

    def _layer(self, sequences: Iterable[tuple[float, float]]) -> float:
        """Attention among sequences, each (length, how many of it)."""
        heads = self._encoder.num_heads
        return sum(self._attention(num * heads, length) for length, num in sequences)


def _windows(sequences: Iterable[tuple[int, int]], window: int) -> list[tuple[float, float]]:
    """Sequences cut into windows; one shorter than a window is one."""
    return [(min(length, window), num * max(1.0, length / window)) for length, num in sequences]
