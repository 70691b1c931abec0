"""What a policy must know of the world, in seconds: a guess, corrected by what is observed."""

from typing import Protocol

from easerve.types import MediaItem

GAIN = 0.05
SHRINKAGE = 0.02


class Estimates(Protocol):
    """Service times as a profile or a guess has them."""

    def encode_s(self, num_items: int, num_tokens: int) -> float:
        """One encoder forward over ``num_items`` items of ``num_tokens`` embeddings in all."""
        ...

    def prefill_s(self, num_tokens: int) -> float:
        """One prompt of ``num_tokens`` tokens."""
        ...


class Mean:
    """An exponentially weighted mean; the first samples weigh the same, later ones ``GAIN``."""

    def __init__(self, guess: float = 0.0) -> None:
        self.value, self.num_samples = guess, 0

    def observe(self, sample: float) -> None:
        self.num_samples += 1
        self.value += max(GAIN, 1 / self.num_samples) * (sample - self.value)


class Line:
    """``y = base + slope x`` by least squares over samples whose weight fades, shrunk to a guess.

    The guess says how base and slope compare, the samples how fast things are. Samples that are
    spread over ``x`` soon outweigh it (``SHRINKAGE`` is in units of the squared mean of ``x``);
    while all have one ``x`` it decides. Neither base nor slope is ever negative.
    """

    def __init__(self, base: float, slope: float) -> None:
        self._base, self._slope = base, slope
        self._x, self._y, self._xx, self._xy = (Mean() for _ in range(4))

    def observe(self, x: float, y: float) -> None:
        """One more sample; of one at 0 nothing is learned."""
        if x <= 0:
            return
        for mean, sample in ((self._x, x), (self._y, y), (self._xx, x * x), (self._xy, x * y)):
            mean.observe(sample)

    def line(self) -> tuple[float, float]:
        """Base and slope."""
        if not self._x.num_samples:
            return self._base, self._slope
        x, y = self._x.value, self._y.value
        guess = self._base + self._slope * x
        slope = self._slope * y / guess if guess > 0 else 0.0
        variance = max(0.0, self._xx.value - x * x)
        covariance = self._xy.value - x * y
        shrinkage = SHRINKAGE * x * x
        slope = (covariance + shrinkage * slope) / (variance + shrinkage)
        slope = min(max(slope, 0.0), y / x)
        return y - slope * x, slope

    def at(self, x: float) -> float:
        """``y``; 0 where ``x`` is."""
        base, slope = self.line()
        return base + slope * x if x else 0.0


class Times:
    """Service times in seconds, learned from a first guess on."""

    def __init__(self, guess: Estimates) -> None:
        base_s, tokens = guess.encode_s(0, 0), 1000
        self.encode = Line(base_s, (guess.encode_s(1, tokens) - base_s) / tokens)
        self._prefill_s, self._prefill_tokens = Mean(guess.prefill_s(tokens)), Mean(tokens)
        self._decode_s = Mean()
        self._item_tokens = Mean()

    def seen(self, item: MediaItem) -> None:
        """An item of this size has come."""
        self._item_tokens.observe(item.num_tokens)

    def prefilled(self, seconds: float, num_tokens: int) -> None:
        self._prefill_s.observe(seconds)
        self._prefill_tokens.observe(num_tokens)

    def decoded(self, seconds: float) -> None:
        """A leg took so long."""
        self._decode_s.observe(seconds)

    @property
    def prefill_s(self) -> float:
        """Of a prompt."""
        return self._prefill_s.value

    @property
    def observed_prefill_s(self) -> float:
        """Of a prompt; 0 while unknown."""
        return self._prefill_s.value if self._prefill_s.num_samples else 0.0

    @property
    def prefill_token_s(self) -> float:
        return self._prefill_s.value / max(1.0, self._prefill_tokens.value)

    @property
    def decode_s(self) -> float:
        """Of a leg; 0 while unknown."""
        return self._decode_s.value

    def items_in(self, max_tokens: int) -> int:
        """How many items of the usual size so many tokens are; one at least."""
        return max(1, int(max_tokens / max(1.0, self._item_tokens.value)))

    def items_s(self, num_items: int, batch_items: int) -> float:
        """Work of an encoder, in batches of ``batch_items``; 0 while no item was seen."""
        return self.encode.at(batch_items * self._item_tokens.value) / batch_items * num_items

    @property
    def lead_s(self) -> float:
        """From Encode to Decode, without waiting."""
        return self.items_s(1, 1) + self.prefill_s
