"""A fixed cost per call and a cost per token for each stage."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """Seconds; the first guess of the core's estimates, and the pace of the fake engine.

    The defaults are the order of magnitude of a tiny model on one CPU core, not a measurement.
    """

    encode_base_s: float = 0.01
    encode_token_s: float = 1e-5
    prefill_base_s: float = 0.01
    prefill_token_s: float = 1e-4
    decode_token_s: float = 0.02
    decode_crowding: float = 0.05
    """Each further request makes a decode step longer by this share."""

    def encode_s(self, num_items: int, num_tokens: int) -> float:
        return self.encode_base_s + self.encode_token_s * num_tokens

    def prefill_s(self, num_tokens: int) -> float:
        return self.prefill_base_s + self.prefill_token_s * num_tokens

    def step_s(self, num_running: int) -> float:
        """A decode step that gives each of so many requests a token."""
        return self.decode_token_s * (1 + self.decode_crowding * (num_running - 1))
