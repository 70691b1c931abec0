"""The encoder's side of a step: who wants which item, and one bundle for each of them.

``ec_transfer_params`` of a request: ``{"destinations": [[name, ...], ...]}``, the prefill engines
that want each item, in prompt order. One on another host goes by its address, tcp://host:port.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from easerve.engines.vllm.ec.messages import NAME
from easerve.engines.vllm.ec.outbox import Embedding, Outbox
from easerve.engines.vllm.ec.tcp import ADDRESS

if TYPE_CHECKING:
    import torch

# A request that ended so has a reply that is read.
ANSWERED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


class Want(NamedTuple):
    """A request wants an item pushed to these prefill engines."""

    request: str
    key: str
    destinations: tuple[str, ...]


@dataclass
class Wants:
    """What is new in this step."""

    wants: list[Want] = field(default_factory=list)


def destinations_of(request: Any) -> list[tuple[str, ...]]:
    """Of each item of the request; empty when the request names none in the proper form."""
    destinations = (request.ec_transfer_params or {}).get("destinations")
    if not isinstance(destinations, list) or len(destinations) != len(request.mm_features):
        return []
    proper = all(
        isinstance(names, list)
        and all(isinstance(name, str) and _is_destination(name) for name in names)
        for names in destinations
    )
    return [tuple(names) for names in destinations] if proper else []


def _is_destination(name: str) -> bool:
    return bool(NAME.fullmatch(name) or ADDRESS.fullmatch(name))


def was_answered(request: Any) -> bool:
    return request.status.name in ANSWERED


class ProducerScheduler:
    """The scheduler half: notes what each request wants once, and which items go."""

    def __init__(self) -> None:
        self._noted: set[str] = set()  # requests
        self._step = Wants()
        self._allocated: set[str] = set()  # items that this step encodes
        self._evicted: dict[str, None] = {}  # not told yet

    def note(self, request: Any) -> None:
        if request.request_id in self._noted:
            return
        self._noted.add(request.request_id)
        for feature, names in zip(request.mm_features, destinations_of(request), strict=False):
            if names:
                self._step.wants.append(Want(request.request_id, feature.identifier, names))

    def allocate(self, key: str) -> None:
        self._allocated.add(key)

    def end_step(self, freed: Iterable[str]) -> Wants:
        """``freed``: items that left the encoder's cache in this step, maybe to be made anew."""
        self._evicted |= dict.fromkeys(freed)
        for key in self._allocated:
            self._evicted.pop(key, None)
        self._allocated.clear()
        step, self._step = self._step, Wants()
        return step

    def finish(self, request: Any, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
        """The reply's ``ec_transfer_params``: ``items`` as vLLM has them, ``evicted`` keys."""
        self._noted.discard(request.request_id)
        reply: dict[str, Any] = {"items": dict(metadata)} if metadata else {}
        if was_answered(request) and self._evicted:
            reply["evicted"], self._evicted = list(self._evicted), {}
        return reply or None


class ProducerWorker:
    """The worker half: pushes at the end of a step what the step made or still had.

    What a request wants is forgotten when it is pushed or when the request ends.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._wanted: dict[str, list[Want]] = {}  # by item, until it is made
        self._ready: dict[str, dict[str, torch.Tensor]] = {}  # destination -> items

    def begin_step(self, step: Wants, encoder_cache: Mapping[str, "torch.Tensor"]) -> None:
        for want in step.wants:
            self._wanted.setdefault(want.key, []).append(want)
        for key in [want.key for want in step.wants]:
            if key in encoder_cache:  # not made again, so never saved again
                self.save(key, encoder_cache[key])

    def save(self, key: str, embedding: "torch.Tensor") -> None:
        for want in self._wanted.pop(key, ()):
            for name in want.destinations:
                self._ready.setdefault(name, {})[key] = embedding

    def end_step(self, finished: set[str]) -> None:
        """``finished``: requests that have ended; what they still wanted will not be made."""
        ready, self._ready = self._ready, {}
        if finished and self._wanted:
            left = {
                key: [want for want in wants if want.request not in finished]
                for key, wants in self._wanted.items()
            }
            self._wanted = {key: wants for key, wants in left.items() if wants}
        if ready:
            sent_ns = time.monotonic_ns()
            step = HostCopies({k: t for items in ready.values() for k, t in items.items()})
            for name, items in ready.items():
                self._outbox.push(name, [step.embedding(key) for key in items], sent_ns)

    def close(self) -> None:
        self._outbox.close()


class HostCopies:
    """The embeddings of a step; from a device all are copied to the host once one is needed."""

    def __init__(self, tensors: Mapping[str, "torch.Tensor"]) -> None:
        self._tensors = tensors

    def embedding(self, key: str) -> Embedding:
        tensor = self._tensors[key]
        shape = (tensor.shape[0], tensor.shape[1])
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Embedding(key, shape, dtype, tensor, lambda: self._contents[key])

    @cached_property
    def _contents(self) -> dict[str, memoryview]:
        import torch

        copies = {
            key: tensor.detach().contiguous().to("cpu", non_blocking=True)
            for key, tensor in self._tensors.items()
        }
        if any(tensor.is_cuda for tensor in self._tensors.values()):
            torch.cuda.current_stream().synchronize()
        return {
            key: memoryview(copy.reshape(-1).view(torch.uint8).numpy())
            for key, copy in copies.items()
        }
