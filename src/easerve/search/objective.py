"""What a configuration is worth. The search is given one of these; it knows no engine."""

from dataclasses import dataclass
from typing import Protocol

from easerve.search.space import Configuration


class Unworkable(Exception):
    """This configuration cannot be tried; the text says why. The search goes on."""


@dataclass(frozen=True, slots=True)
class Score:
    """Of one configuration under one load.

    ``goodput_per_s``: requests per second that met the objective, at ``rate_per_s``: the highest
    offered rate at which ``required`` of all requests do, or the lowest rate that was tried if they
    do at none. ``attainment``: the share that did, there.
    """

    goodput_per_s: float
    attainment: float
    rate_per_s: float


class Objective(Protocol):
    """``key``: of all that decides a score besides configuration and seed, so that scores are kept
    by it. ``seeds``: of the loads that a trial averages over; every configuration meets the same.
    ``required``: the attainment that a winner has at least.
    """

    @property
    def key(self) -> str: ...

    @property
    def seeds(self) -> tuple[int, ...]: ...

    @property
    def required(self) -> float: ...

    def score(self, configuration: Configuration, seed: int) -> Score:
        """Raises Unworkable. Calls for one configuration follow each other."""
        ...
