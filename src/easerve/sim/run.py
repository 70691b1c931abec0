"""What a simulation is asked and what came of it: requests, records, busy times, spans."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from easerve.costs.base import Media
from easerve.goodput import Outcome, Record
from easerve.policy.events import Retuned, StartEncode, StartPrefill
from easerve.types import NS_PER_S, Stage


@dataclass(frozen=True, slots=True)
class Request:
    """``num_text_tokens``: of its prompt, without media; ``num_tokens``: of its answer.

    ``keys``: of its items, where some are alike, also those of other requests; none: all differ.
    """

    at_s: float
    items: tuple[Media, ...]
    num_text_tokens: int
    num_tokens: int
    keys: tuple[str, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_text_tokens + sum(item.num_tokens for item in self.items)


class Span(NamedTuple):
    """One piece of work of an engine."""

    engine: str
    kind: str
    begin_ns: int
    end_ns: int
    args: Mapping[str, Any]


@dataclass(slots=True)
class Run:
    """What came of a run; engines and systems write it, nobody of them reads it.

    ``stages``: of each engine. ``batches``, ``prefills``, ``retuned``: decisions of the core, and
    when. ``spans``: only if ``traced``. ``num_preempted``: sequences that were computed once more.
    """

    traced: bool = False
    records: list[Record] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    """Of the requests, in the order of ``records``."""
    stages: dict[str, Stage] = field(default_factory=dict)
    busy_ns: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    spans: list[Span] = field(default_factory=list)
    batches: list[tuple[int, StartEncode]] = field(default_factory=list)
    prefills: list[tuple[int, StartPrefill]] = field(default_factory=list)
    retuned: list[tuple[int, Retuned]] = field(default_factory=list)
    num_items: int = 0
    num_calls: int = 0
    num_preempted: int = 0
    end_s: float = 0.0
    joined_ns: dict[str, int] = field(default_factory=dict)
    """Since when each engine has been there that is there."""
    spent_ns: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How long each was there that has left."""

    def engine(self, name: str, stage: Stage, now_ns: int = 0) -> None:
        """There is this engine from now on."""
        self.stages[name] = stage
        self.joined_ns[name] = now_ns
        self.busy_ns[name] += 0

    def left(self, name: str, now_ns: int) -> None:
        """It works no more; its device may go on under another name."""
        self.spent_ns[name] += now_ns - self.joined_ns.pop(name)

    def busy(self, engine: str, kind: str, begin_ns: int, end_ns: int, **args: Any) -> None:
        """An engine has worked."""
        self.busy_ns[engine] += end_ns - begin_ns
        self.note(engine, kind, begin_ns, end_ns, **args)

    def note(self, engine: str, kind: str, begin_ns: int, end_ns: int, **args: Any) -> None:
        """Something has happened at an engine that does not keep it from working."""
        if self.traced:
            self.spans.append(Span(engine, kind, begin_ns, end_ns, args))

    def encoded(self, num_items: int) -> None:
        """A call of so many items has gone through an encoder."""
        self.num_calls += 1
        self.num_items += num_items

    def record(
        self, name: str, request: Request, first_ns: int | None, end_ns: int, outcome: Outcome
    ) -> None:
        """A request has ended."""
        end_s = end_ns / NS_PER_S
        at_s = min(request.at_s, end_s)  # it was rounded to nanoseconds
        first_s = None if first_ns is None else first_ns / NS_PER_S
        num_tokens = request.num_tokens if outcome == "completed" else 0
        self.ids.append(name)
        self.records.append(Record(at_s, at_s, first_s, end_s, num_tokens, outcome))

    @property
    def busy_s(self) -> dict[str, float]:
        """Of each engine."""
        return {name: each / NS_PER_S for name, each in self.busy_ns.items()}

    @property
    def mean_batch(self) -> float:
        """Items of a call to an encoder."""
        return self.num_items / self.num_calls if self.num_calls else 0.0

    def utilisation(self) -> dict[str, float]:
        """Share of the time that the engines of a stage were there, for which they worked: one that
        never worked counts."""
        end_ns = self.end_s * NS_PER_S
        worked: defaultdict[Stage, int] = defaultdict(int)
        there: defaultdict[Stage, float] = defaultdict(float)
        for name, stage in self.stages.items():
            worked[stage] += self.busy_ns[name]
            there[stage] += self.spent_ns[name] + end_ns - self.joined_ns.get(name, end_ns)
        return {
            stage.value: worked[stage] / there[stage] if there[stage] else 0.0 for stage in worked
        }
