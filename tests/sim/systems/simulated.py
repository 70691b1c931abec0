"""A baseline over costs that can be added up by hand.

An encode takes 1 s and a second for each item, a prompt of 1000 tokens a second, a decode step
0.1 s; the embeddings of a call or an item take 0.5 s to travel, a KV cache 0.25 s.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest.mock import patch

from easerve.costs.base import Costs, Media
from easerve.costs.linear import LinearCosts
from easerve.sim import clock
from easerve.sim.config import SECTIONS
from easerve.sim.llm import LlmEngine
from easerve.sim.run import Request, Run
from easerve.sim.systems.registry import BUILDERS, Baseline
from easerve.sim.world import World
from easerve.types import Modality

ITEM_TOKENS = 100
PICTURE = Media(Modality.IMAGE, ITEM_TOKENS)
MUCH = 1 << 20
NO_HOST = {"dispatch_s": 0, "item_s": 0}


class ByHand(LinearCosts):
    def __init__(self, **changes: float) -> None:
        seconds = {
            "encode_base_s": 1.0,
            "encode_token_s": 0.01,
            "prefill_base_s": 0.0,
            "prefill_token_s": 0.001,
            "decode_token_s": 0.1,
            "decode_crowding": 0.0,
        }
        super().__init__(**{**seconds, **changes})

    def embedding_transfer(self, num_tokens: int) -> float:
        return 0.5

    def kv_transfer(self, num_tokens: int) -> float:
        return 0.25


def text(at_s: float = 0.0, num_prompt: int = 1000, num_tokens: int = 3) -> Request:
    return Request(at_s, (), num_prompt, num_tokens)


def pictures(
    num: int = 1, at_s: float = 0.0, num_prompt: int = 1000, num_tokens: int = 3
) -> Request:
    """A prompt of so many tokens, media included."""
    return Request(at_s, (PICTURE,) * num, num_prompt - num * ITEM_TOKENS, num_tokens)


def world(
    requests: Sequence[Request],
    *,
    costs: Costs | None = None,
    kv_tokens: int = MUCH,
    seed: int = 0,
) -> World:
    used = costs or ByHand()
    return World(
        costs_of=lambda tp, step_overhead_s=None: used,
        kv_tokens=lambda tp, utilization, with_encoder, with_activations=True: kv_tokens,
        num_units=1,
        granule=1,
        requests=requests,
        run=Run(traced=True),
        rng=Random(seed),
    )


@contextmanager
def engines_made() -> Iterator[list[LlmEngine]]:
    made: list[LlmEngine] = []
    init = LlmEngine.__init__

    def recorded(self: LlmEngine, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    with patch.object(LlmEngine, "__init__", recorded):
        yield made


@dataclass(frozen=True, slots=True)
class Simulated:
    system: Baseline
    run: Run

    @property
    def times_s(self) -> Mapping[str, tuple[float | None, float]]:
        """First token and end of each request."""
        pairs = zip(self.run.ids, self.run.records, strict=True)
        return {
            name: (_rounded(record.first_token_s), _rounded(record.end_s) or 0.0)
            for name, record in pairs
        }

    def spans(self, engine: str, kind: str) -> list[tuple[float, float]]:
        spans = (each for each in self.run.spans if each.engine == engine and each.kind == kind)
        return [(round(each.begin_ns / 1e9, 6), round(each.end_ns / 1e9, 6)) for each in spans]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def simulate(
    system: str,
    section: Mapping[str, Any],
    requests: Sequence[Request],
    *,
    costs: Costs | None = None,
    kv_tokens: int = MUCH,
    seed: int = 0,
) -> Simulated:
    """Every request has ended once, and no engine has kept a block."""
    made_of = world(requests, costs=costs, kv_tokens=kv_tokens, seed=seed)
    config = SECTIONS[system].model_validate(section)
    with engines_made() as engines:
        built = BUILDERS[system](config, made_of)
        clock.run(built, built.start())
    run = made_of.run
    assert len(run.records) == len(requests) == len(set(run.ids))
    for engine in engines:
        assert engine.num_free_blocks == engine.limits.num_blocks, engine.name
        assert not engine.num_seqs
    run.end_s = max((record.end_s or 0.0 for record in run.records), default=0.0)
    return Simulated(built, run)
