"""What modelled engines ask of a cost model: how long a stage's work takes, in seconds."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from easerve.types import Modality


@dataclass(frozen=True, slots=True)
class Media:
    """A picture, video or sound as the two models see it.

    ``num_tokens``: embeddings that it becomes in the prompt. ``num_sequences`` of
    ``sequence_tokens`` each: what the encoder attends within (tiles of a picture, pairs of frames,
    pieces of 30 s).
    """

    modality: Modality
    num_tokens: int
    num_sequences: int = 1
    sequence_tokens: int = 0


class Forward(NamedTuple):
    """One step of a language model, over new tokens of prompts and one token of each decode.

    ``prefill_pairs``: the sum, over the new prompt tokens, of the tokens that each attends to,
    itself included: n (n + 1) / 2 for a whole prompt of n. ``num_prompts``: prompts that end in
    this step, so that they get logits as decodes do. ``decode_context``: tokens that the decodes
    attend to, in all.
    """

    prefill_tokens: int = 0
    prefill_pairs: int = 0
    num_prompts: int = 0
    num_decodes: int = 0
    decode_context: int = 0

    @property
    def num_tokens(self) -> int:
        """That go through the layers."""
        return self.prefill_tokens + self.num_decodes

    @property
    def num_rows(self) -> int:
        """Of logits."""
        return self.num_prompts + self.num_decodes


class Costs(ABC):
    """Of one model on one kind of device: the encoder on one, the language model on ``tp`` of them.

    ``share``: of the device's units (SMs, cores) that the work runs on, more than 0, at most 1.
    """

    @abstractmethod
    def encode(self, items: Sequence[Media], share: float = 1.0) -> float:
        """One encoder forward over all items."""

    @abstractmethod
    def forward(self, step: Forward, share: float = 1.0) -> float:
        """One step of the language model."""

    @abstractmethod
    def embedding_transfer(self, num_tokens: int) -> float:
        """Embeddings from an encoder to a prefill engine on other devices, in one bundle."""

    @abstractmethod
    def kv_transfer(self, num_tokens: int) -> float:
        """The KV cache of so many tokens from a prefill to a decode engine."""

    def prefill(self, num_tokens: int, share: float = 1.0) -> float:
        """A whole prompt, alone in its step."""
        return self.forward(Forward(num_tokens, num_tokens * (num_tokens + 1) // 2, 1), share)

    def decode_step(self, num_decodes: int, context_tokens: int, share: float = 1.0) -> float:
        """A token for each of so many sequences, which have so many tokens in all."""
        return self.forward(Forward(num_decodes=num_decodes, decode_context=context_tokens), share)
