"""What a modelled engine must do, found another way.

The best that batching could do, by trying everything: for tiny cases, with the future known. And
the mean time that Poisson arrivals wait for an engine, by the formula of Pollaczek and Khinchine.
"""

import heapq
from collections.abc import Iterator, Sequence
from statistics import fmean


def pollaczek_khinchine_s(rate_per_s: float, services_s: Sequence[float]) -> float:
    """Mean wait until service, first come, first served: rate E[S^2] / (2 (1 - rate E[S])).

    Each of ``services_s`` is as likely as the others. Raises ValueError where the queue has no end.
    """
    load = rate_per_s * fmean(services_s)
    if load >= 1:
        raise ValueError(f"{load:g} engines' work comes to one")
    return rate_per_s * fmean(each * each for each in services_s) / (2 * (1 - load))


def best_mean_ttft_s(
    arrivals_s: Sequence[float],
    base_s: float,
    item_s: float,
    max_items: int,
    prefill_s: float,
    num_prefills: int,
) -> float:
    """The least mean time from arrival to the end of prefill, one encoder, first come first served.

    A call of ``b`` items takes ``base_s + b item_s``; each prefill takes ``prefill_s``. All ways to
    cut the arrivals into calls are tried, ``2 ** (n - 1)`` of them. A call starts as soon as its
    last item is there and the encoder is free: with the cuts given, nothing is won by waiting.
    """
    return min(
        fmean(_ttfts_s(arrivals_s, sizes, base_s, item_s, prefill_s, num_prefills))
        for sizes in _cuts(len(arrivals_s), max_items)
    )


def _cuts(num_items: int, max_items: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut a row of items into calls."""
    if num_items == 0:
        yield ()
    for first in range(1, min(num_items, max_items) + 1):
        for rest in _cuts(num_items - first, max_items):
            yield first, *rest


def _ttfts_s(
    arrivals_s: Sequence[float],
    sizes: Sequence[int],
    base_s: float,
    item_s: float,
    prefill_s: float,
    num_prefills: int,
) -> Iterator[float]:
    free_s, done = 0.0, 0
    prefills_s = [0.0] * num_prefills  # when each is free
    for size in sizes:
        batch = arrivals_s[done : done + size]
        done += size
        free_s = max(free_s, batch[-1]) + base_s + item_s * size
        for arrival_s in batch:
            end_s = max(free_s, prefills_s[0]) + prefill_s
            heapq.heapreplace(prefills_s, end_s)
            yield end_s - arrival_s
