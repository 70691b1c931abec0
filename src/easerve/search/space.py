"""What a search chooses from: allocations of devices to stages, and the knobs of each.

Everything is a grid, so that configurations can be counted, kept and compared. A configuration is
an allocation and a value for each of its knobs that are at work; changes of a scenario's section or
of a deployment file come of it, by the path of the key, with dots (``policy.remote_share``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Value = str | int | float | bool | None
SHARE = "policy.remote_share"
REMOTE_ONLY: Mapping[str, Any] = {"local_prefill": None, "partition": None, SHARE: 1.0}
"""The changes without local prefill, whatever a file says of it."""


@dataclass(frozen=True, slots=True)
class Knob:
    """``values``: numbers in their order, or names. ``only_if``: of another knob, before this one,
    the values with which this one does anything; None: always.
    """

    path: str
    values: tuple[Value, ...]
    only_if: tuple[str, tuple[Value, ...]] | None = None

    @property
    def is_ordered(self) -> bool:
        """Neighbours are alike."""
        return not any(isinstance(each, bool | str) or each is None for each in self.values)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Engines of each stage, as in ``e2-p2x2-d2``: two encoders, two prefill engines of two devices
    each, one decode engine of two.

    ``changes`` hold with every configuration; ``offload``: those that local prefill needs besides,
    None where nothing can run beside an encoder. Without offload there is neither ``local_prefill``
    nor ``partition``.
    """

    name: str
    changes: Mapping[str, Any]
    offload: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Configuration:
    """``values``: of the knobs at work, in the order of the space."""

    allocation: str
    values: tuple[tuple[str, Value], ...]

    def __getitem__(self, path: str) -> Value:
        return dict(self.values)[path]

    def get(self, path: str) -> Value:
        """None for a knob that is not at work."""
        return dict(self.values).get(path)


@dataclass(frozen=True)
class Space:
    allocations: Sequence[Allocation]
    knobs: Sequence[Knob]
    _by_name: dict[str, Allocation] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        named = {each.name: each for each in self.allocations}
        object.__setattr__(self, "_by_name", named)

    def knobs_of(self, allocation: str) -> list[Knob]:
        """Where nothing can run beside an encoder, all prefill is remote."""
        if self._by_name[allocation].offload is not None:
            return list(self.knobs)
        return [Knob(SHARE, (1.0,)) if each.path == SHARE else each for each in self.knobs]

    def configuration(self, allocation: str, values: Mapping[str, Value]) -> Configuration:
        """Of the values of an allocation's knobs; those that are not at work are left out, and one
        that has but one value here has that.
        """
        chosen: dict[str, Value] = {}
        for knob in self.knobs_of(allocation):
            if is_at_work(knob, chosen):
                only = knob.values[0] if len(knob.values) == 1 else None
                chosen[knob.path] = values[knob.path] if only is None else only
        return Configuration(allocation, tuple(chosen.items()))

    def of(self, allocation: str) -> Iterator[Configuration]:
        """Every configuration of an allocation, each once, in the order of the knobs' values."""
        yield from self._choices(allocation, self.knobs_of(allocation), {})

    def _choices(
        self, allocation: str, knobs: Sequence[Knob], chosen: Mapping[str, Value]
    ) -> Iterator[Configuration]:
        if not knobs:
            yield Configuration(allocation, tuple(chosen.items()))
            return
        knob, *others = knobs
        for value in knob.values if is_at_work(knob, chosen) else ():
            yield from self._choices(allocation, others, {**chosen, knob.path: value})
        if not is_at_work(knob, chosen):
            yield from self._choices(allocation, others, chosen)

    def __iter__(self) -> Iterator[Configuration]:
        for each in self.allocations:
            yield from self.of(each.name)

    def __len__(self) -> int:
        return sum(self.num_of(each.name) for each in self.allocations)

    def num_of(self, allocation: str) -> int:
        """Of the configurations of an allocation, without making them."""
        return _count(self.knobs_of(allocation), {})

    def restricted(self, names: Sequence[str]) -> "Space":
        """To some of the allocations, in this order."""
        return Space([self._by_name[name] for name in names], self.knobs)

    def changes(self, configuration: Configuration) -> dict[str, Any]:
        """By the path of the key; None takes a section away."""
        allocation = self._by_name[configuration.allocation]
        changes = dict(allocation.changes) | dict(configuration.values)
        if allocation.offload is None or configuration.get(SHARE) == 1:
            return changes | dict(REMOTE_ONLY)
        return changes | dict(allocation.offload)


def is_at_work(knob: Knob, chosen: Mapping[str, Value]) -> bool:
    """With the values of the knobs before it."""
    if knob.only_if is None:
        return True
    path, values = knob.only_if
    return path in chosen and chosen[path] in values


def _count(knobs: Sequence[Knob], chosen: Mapping[str, Value]) -> int:
    """Only a knob that others depend on is looked at value by value."""
    if not knobs:
        return 1
    knob, *others = knobs
    if not is_at_work(knob, chosen):
        return _count(others, chosen)
    if not any(each.only_if is not None and each.only_if[0] == knob.path for each in others):
        return len(knob.values) * _count(others, {**chosen, knob.path: knob.values[0]})
    return sum(_count(others, {**chosen, knob.path: value}) for value in knob.values)
