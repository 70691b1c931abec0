"""A core over the plainest engines: a prompt a step, endless memory, transfers at once.

What is left is what the rules of the core do. Local prefill does not slow its encoder.
"""

from collections.abc import Iterable, Sequence

from easerve.costs.base import Media
from easerve.costs.linear import LinearCosts
from easerve.policy.core import Core
from easerve.policy.events import WorkerJoined
from easerve.sim import clock
from easerve.sim.encoder import EncodeEngine, EncodeLimits
from easerve.sim.fleet import Fleet
from easerve.sim.llm import LlmEngine, LlmLimits
from easerve.sim.run import Request, Run
from easerve.sim.sharing import Own
from easerve.sim.systems.served import Served
from easerve.types import NS_PER_S, Modality, Stage, WorkerId

STAGES = {"e": Stage.ENCODE, "p": Stage.PREFILL, "l": Stage.PREFILL, "d": Stage.DECODE}
ENDLESS = 1 << 40


def request(at_s: float, pictures: Sequence[int], num_text_tokens: int, num_tokens: int) -> Request:
    """``pictures``: embedding tokens of each."""
    items = tuple(Media(Modality.IMAGE, tokens) for tokens in pictures)
    return Request(at_s, items, num_text_tokens, num_tokens)


def simulate(
    core: Core,
    costs: LinearCosts,
    workers: Sequence[str],
    requests: Iterable[Request],
    num_slots: int = 256,
) -> Run:
    """``workers``: names as in ``e0``, ``p0``, ``d0``; ``l0`` prefills beside ``e0``."""
    run = Run()

    def llm(name: str) -> LlmEngine:
        limits = LlmLimits(
            ENDLESS, num_slots, ENDLESS, chunked=False, max_prompts=1, holds=name[0] != "d"
        )
        return LlmEngine(name, STAGES[name[0]], costs, Own(), limits, run)

    fleet = Fleet(
        costs,
        run,
        [
            EncodeEngine(name, costs, Own(), EncodeLimits(), run)
            for name in workers
            if name[0] == "e"
        ],
        [llm(name) for name in workers if name[0] in "pl"],
        [llm(name) for name in workers if name[0] == "d"],
        {},
        {},
    )
    joined = [_joined(name, num_slots) for name in workers]
    served = Served(core, fleet, joined, list(requests), run)
    run.end_s = clock.run(served, served.start()) / NS_PER_S
    return run


def _joined(name: str, num_slots: int) -> WorkerJoined:
    beside = (WorkerId(f"e{name[1:]}"),) if name[0] == "l" else ()
    return WorkerJoined(WorkerId(name), STAGES[name[0]], num_slots, beside=beside)
