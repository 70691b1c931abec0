"""What a method is, and methods by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from easerve.search.space import Configuration, Space
from easerve.search.trials import Trial

METHODS = ("has", "tpe", "random", "coordinate", "grid")


class Method(Protocol):
    """A dataclass: its fields, the space apart, are settings that make a study what it is.

    ``is_blind``: it does not read results, only what was tried, so that the next configurations are
    known ahead.
    """

    @property
    def name(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def is_blind(self) -> bool: ...

    def propose(self, trials: Sequence[Trial]) -> Configuration | None:
        """One that is not in the history, always the same after the same history; None: there is
        nothing left to try. ``trials``: finished, in order of number.
        """
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """An allocation that pruning kept. ``starts``: configurations of it that are tried first."""

    allocation: str
    starts: tuple[Configuration, ...] = ()


def method(name: str, space: Space, seed: int, candidates: Sequence[Candidate] = ()) -> Method:
    """``candidates``: for ``has``, in order of what they promise; without any, every allocation is
    one, without starts. The others know nothing of them. Raises ValueError for a name that is none.
    """
    from easerve.search.methods.coordinate import Coordinate
    from easerve.search.methods.has import Has
    from easerve.search.methods.listed import Drawn, Grid
    from easerve.search.methods.tpe import Tpe

    match name:
        case "has":
            named = candidates or [Candidate(each.name) for each in space.allocations]
            return Has(space, tuple(named), seed)
        case "tpe":
            return Tpe(space, seed)
        case "random":
            return Drawn(space, seed)
        case "coordinate":
            return Coordinate(space, seed)
        case "grid":
            return Grid(space, seed)
    raise ValueError(f"method {name!r} is none of {', '.join(METHODS)}")
