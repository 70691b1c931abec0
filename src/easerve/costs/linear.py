"""A fixed cost per call and a cost per token for each stage."""

from collections.abc import Sequence
from dataclasses import dataclass

from easerve.costs.base import Costs, Forward, Media


@dataclass(frozen=True, slots=True)
class LinearCosts(Costs):
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

    def encode(self, items: Sequence[Media], share: float = 1.0) -> float:
        return self.encode_s(len(items), sum(item.num_tokens for item in items)) / share

    def forward(self, step: Forward, share: float = 1.0) -> float:
        """Prompts one after another, then the decodes."""
        seconds = self.prefill_base_s * step.num_prompts
        seconds += self.prefill_token_s * step.prefill_tokens
        if step.num_decodes:
            seconds += self.step_s(step.num_decodes)
        return seconds / share

    def embedding_transfer(self, num_tokens: int) -> float:
        return 0.0

    def kv_transfer(self, num_tokens: int) -> float:
        return 0.0
