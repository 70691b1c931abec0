"""Where: the engine that a piece of work goes to."""

from collections.abc import Collection, Mapping

from easerve.types import WorkerId


def least_backlog(
    backlog_tokens: Mapping[WorkerId, int], avoid: Collection[WorkerId] = ()
) -> WorkerId | None:
    """The worker with the fewest tokens ahead, ties by id; None where there is no worker.

    ``avoid`` are workers that failed this request before: taken only when there is no other.
    """
    return min(
        backlog_tokens,
        key=lambda worker: (worker in avoid, backlog_tokens[worker], worker),
        default=None,
    )
