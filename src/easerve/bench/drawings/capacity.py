"""The highest rates that searches have found, by tier and system."""

from collections.abc import Iterator, Mapping, Sequence

from easerve.bench.drawings.parts import Cell, Chart, Series, Table
from easerve.bench.drawings.results import Capacity


def drawn(found: Sequence[Capacity], number: Mapping[str, int]) -> Iterator[Table | Chart]:
    """The highest rate of each tier and system, as a table and as bars in their brackets.

    ``number``: of each system's colour.
    """
    names = list(dict.fromkeys(name for each in found for name in each.max_rate_per_s))
    wanted = " or ".join(f"{100 * each:g} %" for each in {each.attainment_wanted for each in found})
    title = f"Highest rate at which {wanted} of requests met the promise"
    rows: list[list[Cell]] = [
        [each.system, *(_in_words(each, name) for name in names)] for each in found
    ]
    rows += [_ratios(found[0], each, names) for each in found[1:]]
    yield Table(f"{title}, requests/s", ["system", *names], rows)
    if any(best is not None for each in found for best, _ in each.best.values()):
        best = [[each.system, *(_best(each, name) for name in names)] for each in found]
        yield Table("Most goodput at any rate, /s", ["system", *names], best)
    bars = [
        Series(
            each.system,
            names,
            [each.max_rate_per_s.get(name) for name in names],
            *_whiskers(each, names),
            colour=number[each.system],
        )
        for each in found
    ]
    if any(rate is not None for bar in bars for rate in bar.y):
        yield Chart(title, "tier", "requests/s", bars, "bar")


def notes(found: Sequence[Capacity]) -> Iterator[str]:
    """What a search says of its own result."""
    for each in found:
        if each.notes:
            yield f"{each.system}: {'; '.join(each.notes)}."


def alerts(found: Sequence[Capacity]) -> Iterator[str]:
    for each in found:
        if each.invalid_because:
            yield f"INCOMPLETE: the search of {each.system}: {'; '.join(each.invalid_because)}"


def _whiskers(
    found: Capacity, names: Sequence[str]
) -> tuple[list[float | None], list[float | None]]:
    lows, highs = [], []
    for name in names:
        low, high = found.bracket_per_s.get(name, (None, None))
        rate = found.max_rate_per_s.get(name)
        lows.append(rate if low is None else low)
        highs.append(rate if high is None else high)
    return lows, highs


def _in_words(found: Capacity, name: str) -> str | None:
    rate = found.max_rate_per_s.get(name)
    _, high = found.bracket_per_s.get(name, (None, None))
    if rate is None:
        return None if high is None else f"< {high:.3g}"
    return f"≥ {rate:.3g}" if high is None else f"{rate:.3g} (< {high:.3g})"


def _best(found: Capacity, name: str) -> str | None:
    best, at = found.best.get(name, (None, None))
    if best is None:
        return None
    return f"{best:.3g}" if at is None else f"{best:.3g} at {at:.3g}"


def _ratios(first: Capacity, other: Capacity, names: Sequence[str]) -> list[Cell]:
    """How many times the other's rate; a dash where one of the two is not known."""
    cells: list[Cell] = [f"{first.system} / {other.system}"]
    for name in names:
        ours, theirs = first.max_rate_per_s.get(name), other.max_rate_per_s.get(name)
        cells.append(f"{ours / theirs:.2f} times" if ours and theirs else None)
    return cells
