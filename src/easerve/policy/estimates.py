"""What a policy must know of the world, in seconds."""

from typing import Protocol


class Estimates(Protocol):
    """Service times. Filled from a profile and from what was observed; the core only asks."""

    def encode_s(self, num_items: int, num_tokens: int) -> float:
        """One encoder forward over ``num_items`` items of ``num_tokens`` embeddings in all."""
        ...

    def prefill_s(self, num_tokens: int) -> float:
        """One prompt of ``num_tokens`` tokens."""
        ...

    def decode_s(self, num_tokens: int) -> float:
        """``num_tokens`` decode steps."""
        ...
