"""A step of a language model, as a sum of kernels.

A layer is four products, attention and, between ``tp`` devices, two all-reduces; then come the
logits of the tokens that get any. Operations on single values (norms, rotary positions,
activations, residuals) are counted by their bytes, at the bandwidth of memory.

A chunk of n new tokens with p pairs is taken as n / s whole prompts of s = 2 p / n - 1 tokens:
they attend to as many tokens, from as many query tokens.
"""

from easerve.config import ConfigError
from easerve.costs.base import Forward
from easerve.costs.hardware import Hardware
from easerve.costs.kernels import Shape
from easerve.costs.models import Language
from easerve.costs.parts import Kernels, Knobs, Pace, Parts, memory_rate


class LanguageCosts:
    """On ``tp`` devices. Raises ConfigError if the model cannot be divided by that."""

    def __init__(
        self, model: Language, hardware: Hardware, tp: int, kernels: Kernels, knobs: Knobs
    ) -> None:
        _check_divisible(model, tp)
        self._heads, self._kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
        self._window = model.window or 0
        self._num_global, self._num_window = model.num_global_layers, model.num_window_layers
        shapes = _language_shapes(model, self._heads, self._kv_heads, tp)
        self._layers = kernels.products([(model.num_layers, shape) for shape in shapes])
        logits = (model.hidden, -(-model.vocab // tp))
        self._logits = kernels.products([(1, logits)])
        ratio = self._heads / self._kv_heads
        self._causal = kernels.causal(model.head_dim, ratio)
        self._generation = kernels.generation(model.head_dim, ratio)
        values = model.num_layers * _layer_values(model, self._heads, self._kv_heads, tp)
        self._token_s = values * model.value_bytes / memory_rate(hardware)
        self._all_reduce = kernels.all_reduce(tp) if tp > 1 else None
        self._reduced_bytes = model.hidden * model.value_bytes
        self._num_reduced = 2 * model.num_layers
        self._knobs = knobs
        self._others_s: dict[tuple[int, int, Pace], float] = {}

    def seconds(self, step: Forward, pace: Pace) -> float:
        """The sum of its parts."""
        num_new, _, num_prompts, num_decodes, _ = step
        tokens, rows = num_new + num_decodes, num_prompts + num_decodes
        if not tokens:
            return 0.0
        others_s = self._others_s.get((tokens, rows, pace))
        if others_s is None:
            others_s = self._others_s[tokens, rows, pace] = sum(self._others(tokens, rows, pace))
        return others_s + self._attention(step, pace)

    def parts(self, step: Forward, pace: Pace) -> Parts:
        """0 of a step without tokens."""
        if not step.num_tokens:
            return Parts()
        others = self._others(step.num_tokens, step.num_rows, pace)
        return others._replace(attention=self._attention(step, pace))

    def _attention(self, step: Forward, pace: Pace) -> float:
        num_new, pairs, _, num_decodes, context = step
        seconds = 0.0
        if num_new:
            seconds = pace.computing * self._prefill(num_new, pairs / num_new)
        if num_decodes:
            seconds += pace.memory * self._decode(num_decodes, context / num_decodes)
        return self._knobs.attention_scale * seconds

    def _others(self, tokens: int, rows: int, pace: Pace) -> Parts:
        """All but attention, which alone depends on what came before."""
        knobs, reduced_s = self._knobs, 0.0
        if self._all_reduce is not None:
            reduced_s = self._num_reduced * self._all_reduce(tokens * self._reduced_bytes)
        return Parts(
            gemm=knobs.gemm_scale * pace.of(self._layers, tokens),
            all_reduce=knobs.all_reduce_scale * reduced_s,
            elementwise=tokens * self._token_s * pace.memory,
            logits=knobs.gemm_scale * pace.of(self._logits, rows) if rows else 0.0,
            overhead=knobs.step_overhead_s,
        )

    def _prefill(self, num_new: int, context: float) -> float:
        """``context``: tokens that one attends to, in the mean."""
        seconds = self._num_global * self._causal_layer(num_new, context)
        if self._num_window:
            length, window = 2 * context - 1, self._window
            if length > window:
                context = window * (1 - (window - 1) / (2 * length))
            seconds += self._num_window * self._causal_layer(num_new, context)
        return seconds

    def _causal_layer(self, num_new: int, context: float) -> float:
        length = max(1.0, 2 * context - 1)
        return self._causal(self._heads * num_new / length, length)

    def _decode(self, num_decodes: int, context: float) -> float:
        heads = num_decodes * self._kv_heads
        seconds = self._num_global * self._generation(heads, context)
        if self._num_window:
            kept = min(context, self._window)
            seconds += self._num_window * self._generation(heads, kept)
        return seconds


def _check_divisible(model: Language, tp: int) -> None:
    if model.num_heads % tp or (model.num_kv_heads % tp and tp % model.num_kv_heads):
        raise ConfigError(
            f"tensor_parallel_size {tp}: it must divide {model.num_heads} heads, and divide "
            f"{model.num_kv_heads} heads of the KV cache or be a multiple of them"
        )


def _language_shapes(model: Language, heads: int, kv_heads: int, tp: int) -> tuple[Shape, ...]:
    """Of a layer, on one of ``tp`` devices."""
    queries, inner = heads * model.head_dim, -(-model.intermediate // tp)
    return (
        (model.hidden, queries + 2 * kv_heads * model.head_dim),
        (queries, model.hidden),
        (model.hidden, 2 * inner),
        (inner, model.hidden),
    )


def _layer_values(model: Language, heads: int, kv_heads: int, tp: int) -> int:
    """Values that operations on single values read and write for a token in a layer.

    Two norms with their residual (two vectors read, two written), rotary positions of queries and
    keys, keys and values into the KV cache, and the activation of a gated MLP.
    """
    rotary = 2 * (heads + kv_heads) * model.head_dim
    cached = 4 * kv_heads * model.head_dim
    return 8 * model.hidden + rotary + cached + 3 * -(-model.intermediate // tp)
