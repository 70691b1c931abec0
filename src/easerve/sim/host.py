"""CPU work around the engines' steps: router, preparation, API servers, client.

On a machine whose cores the engines share, it takes their time; each process has one thread and
does one thing after another. On GPUs it is left out, but for what a scenario gives as seconds of
its own (``prepare_s``, ``item_s``, ``dispatch_s``).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from easerve.costs.profiled import Host as Times
from easerve.sim.clock import Effect, Handler
from easerve.sim.sharing import Device

Job = tuple[str, float]
"""A process, and the CPU seconds that it needs."""
ROUTER, PREPARATION, CLIENT = "router", "preparation", "client"


class NoHost:
    """Nothing takes any time."""

    takes_time = False

    def arrived(self, then: Handler, now_ns: int) -> Iterable[Effect]:
        """A request has been sent; ``then`` the router has read it."""
        return then(now_ns)

    def prepare(self, num_items: int, renders: str, then: Handler, now_ns: int) -> Iterable[Effect]:
        """Its media are decoded, its prompt is rendered by the engine ``renders``."""
        return then(now_ns)

    def call_encode(
        self, engine: str, num_items: int, then: Handler, now_ns: int
    ) -> Iterable[Effect]:
        """An encoder's API server takes a call."""
        return then(now_ns)

    def call_prefill(self, engine: str, then: Handler, now_ns: int) -> Iterable[Effect]:
        return then(now_ns)

    def call_decode(self, engine: str, then: Handler, now_ns: int) -> Iterable[Effect]:
        return then(now_ns)

    def hand_over(self, engine: str, now_ns: int) -> Iterable[Effect]:
        """A prefill engine has given a KV cache away."""
        return ()

    def stepped(self, engine: str, num_tokens: int, now_ns: int) -> Iterable[Effect]:
        """A decode engine has made so many tokens, which go to their clients."""
        return ()

    def delivered(self, engine: str, then: Handler, now_ns: int) -> Iterable[Effect]:
        """``then`` what a decode engine has made by now is at its clients."""
        return [(now_ns, then)]


class Process:
    """One thread on a device."""

    def __init__(self, name: str, device: Device) -> None:
        self._name, self._device = name, device
        self._jobs: deque[tuple[float, Handler]] = deque()
        self._busy = False

    def run(self, seconds: float, then: Handler, now_ns: int) -> Iterator[Effect]:
        self._jobs.append((seconds, then))
        yield from self._go_on(now_ns)

    def _go_on(self, now_ns: int) -> Iterator[Effect]:
        """Whatever takes no time is done at once."""
        while self._jobs and not self._busy:
            seconds, then = self._jobs.popleft()
            if seconds:
                self._busy = True
                done = partial(self._done, then)
                yield from self._device.begin(self._name, seconds, 1.0, now_ns, done)
            else:
                yield now_ns, then

    def _done(self, then: Handler, now_ns: int) -> Iterator[Effect]:
        self._busy = False
        yield now_ns, then
        yield from self._go_on(now_ns)


class Host(NoHost):
    """As a profile has measured it."""

    takes_time = True

    def __init__(self, times: Times, device: Device) -> None:
        self._times, self._device = times, device
        self._processes: dict[str, Process] = {}

    def arrived(self, then: Handler, now_ns: int) -> Iterable[Effect]:
        times = self._times
        return self._run(
            [(CLIENT, times.client_request_s), (ROUTER, times.router_request_s)], then, now_ns
        )

    def prepare(self, num_items: int, renders: str, then: Handler, now_ns: int) -> Iterable[Effect]:
        times = self._times
        prepare_s = times.prepare_s * num_items
        return self._run(
            [(PREPARATION, prepare_s), (_server(renders), times.render_s)], then, now_ns
        )

    def call_encode(
        self, engine: str, num_items: int, then: Handler, now_ns: int
    ) -> Iterable[Effect]:
        times = self._times
        seconds = times.encode_call_s + times.encode_item_s * num_items
        return self._run([(_server(engine), seconds)], then, now_ns)

    def call_prefill(self, engine: str, then: Handler, now_ns: int) -> Iterable[Effect]:
        return self._run([(_server(engine), self._times.prefill_call_s)], then, now_ns)

    def call_decode(self, engine: str, then: Handler, now_ns: int) -> Iterable[Effect]:
        return self._run([(_server(engine), self._times.decode_call_s)], then, now_ns)

    def hand_over(self, engine: str, now_ns: int) -> Iterable[Effect]:
        return self._run([(f"{engine} core", self._times.handover_s)], _nothing, now_ns)

    def stepped(self, engine: str, num_tokens: int, now_ns: int) -> Iterable[Effect]:
        if not num_tokens:
            return ()
        times = self._times
        jobs = [
            (_server(engine), times.decode_step_s + times.decode_token_s * num_tokens),
            (ROUTER, times.router_token_s * num_tokens),
            (CLIENT, times.client_token_s * num_tokens),
        ]
        return self._run(jobs, _nothing, now_ns)

    def delivered(self, engine: str, then: Handler, now_ns: int) -> Iterable[Effect]:
        return self._run([(_server(engine), 0.0), (ROUTER, 0.0), (CLIENT, 0.0)], then, now_ns)

    def _run(self, jobs: Sequence[Job], then: Handler, now_ns: int) -> Iterable[Effect]:
        """One after the other, each on its process."""
        if not jobs:
            return then(now_ns)
        (name, seconds), *rest = jobs
        process = self._processes.setdefault(name, Process(name, self._device))
        return process.run(seconds, partial(self._run, rest, then), now_ns)


def _server(engine: str) -> str:
    """The API server of an engine."""
    return f"{engine} server"


def _nothing(now_ns: int) -> Iterable[Effect]:
    return ()
