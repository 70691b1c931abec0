"""A prefill engine's side of a step: a request is held back until its items are there.

``ec_transfer_params`` of a request: ``{"coming": [index, ...]}``, its items that are on their way.
Of its reply: ``wait_s``, the seconds it was held back; ``bundles`` that came to the engine, each as
``[num_items, num_bytes, usable_s]``, and ``evicted`` keys, since the engine last said so.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from easerve.engines.vllm.ec.producer import was_answered
from easerve.engines.vllm.ec.store import Placed, Store

if TYPE_CHECKING:
    import torch

GRACE_S = 0.25  # for items that should be there: a push may just be on its way
IDLE_S = 0.01  # an engine that has nothing else to do looks again so often, or when something came
STEPS_IN_FLIGHT = 8  # more than vLLM ever has


@dataclass
class Loads:
    """What a step takes out of the store."""

    items: dict[str, Placed] = field(default_factory=dict)


@dataclass(slots=True)
class _Wait:
    """``coming``: indices of the items that are waited for longer than the others."""

    since: float
    coming: frozenset[int]
    ended: float | None = None


def coming_of(request: Any) -> frozenset[int]:
    """Indices of the request's items that are on their way."""
    coming = (request.ec_transfer_params or {}).get("coming")
    return (
        frozenset(each for each in coming if isinstance(each, int))
        if isinstance(coming, list)
        else frozenset()
    )


class ConsumerScheduler:
    """The scheduler half. A request holds its items in ``store`` from first sight to its end."""

    def __init__(
        self,
        store: Store,
        arrived: threading.Event,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._arrived = store, arrived
        self._timeout_s, self._clock = timeout_s, clock
        self._waits: dict[str, _Wait] = {}  # by request
        self._unavailable: set[str] = set()
        self._is_waiting = False  # whether a request was held back in this step
        self._is_idle = False  # whether nothing was done in the last one because of that
        self._step = Loads()
        # Workers in other processes open the memory of a step late; until then it must be there.
        self._in_flight: deque[Loads] = deque(maxlen=STEPS_IN_FLIGHT)

    def is_ready(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether all items are there that the tokens still to be computed need.

        Only the store counts: what the engine's own encoder cache has may go within this step.
        """
        now, name = self._clock(), request.request_id
        wait = self._waits.get(name)
        if wait is None:
            wait = self._waits[name] = _Wait(now, coming_of(request))
            self._store.hold(name, [feature.identifier for feature in request.mm_features])
        needed = [
            index
            for index, feature in enumerate(request.mm_features)
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        ]
        missing = [index for index in needed if not self._has(request, index)]
        if missing and self._is_idle:
            # Here, not at the end of the step: what comes now can be used in this one.
            self._is_idle = False
            self._arrived.wait(IDLE_S)
            missing = [index for index in missing if not self._has(request, index)]
        if not missing:
            self._unavailable.discard(name)
            if wait.ended is None:
                wait.ended = self._clock()
            return True
        self._is_waiting = True
        patience_s = min(self._timeout_s if i in wait.coming else GRACE_S for i in missing)
        if now >= wait.since + patience_s:
            self._unavailable.add(name)
        return False

    def _has(self, request: Any, index: int) -> bool:
        key = request.mm_features[index].identifier
        placed = self._store.get(key)
        if placed is not None and placed.item.shape[0] != request.get_num_encoder_embeds(index):
            self._store.reject(request.request_id, key)
            return False
        return placed is not None

    def take_unavailable(self) -> set[str]:
        """Requests that have waited too long."""
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def has_item(self, key: str) -> bool:
        return self._store.get(key) is not None

    def load(self, key: str) -> None:
        placed = self._store.get(key)
        if placed is not None:
            self._step.items[key] = placed

    def end_step(self, num_tokens: int) -> Loads:
        """``num_tokens`` are scheduled."""
        self._is_idle = self._is_waiting and not num_tokens
        self._arrived.clear()
        self._is_waiting = False
        step, self._step = self._step, Loads()
        self._in_flight.append(step)
        return step

    def finish(self, request: Any) -> dict[str, Any] | None:
        """The reply's ``ec_transfer_params``."""
        wait = self._waits.pop(request.request_id, None)
        self._store.release(request.request_id)
        self._unavailable.discard(request.request_id)
        if not was_answered(request):
            return None
        arrivals, evicted = self._store.take_news()
        reply: dict[str, Any] = {}
        if wait is not None and wait.ended is not None:
            reply["wait_s"] = wait.ended - wait.since
        if arrivals:
            reply["bundles"] = [list(arrival) for arrival in arrivals]
        if evicted:
            reply["evicted"] = evicted
        return reply or None


def load(step: Loads, encoder_cache: dict[str, "torch.Tensor"], device: str) -> None:
    """The worker half: put a step's items into the engine's encoder cache, on a CPU uncopied."""
    for key, placed in step.items.items():
        if key not in encoder_cache:
            encoder_cache[key] = placed.memory.tensor(placed.item).to(device)
