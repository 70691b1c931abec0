"""Embeddings from one process to another, for ``easerve bench transfer``: connectors, no engines.

Run as ``python -m easerve.engines.vllm.transfer FD SETTINGS``. SETTINGS is a JSON object: for each
connector its ``producer`` and its ``consumer``, each as ``--ec-transfer-config`` has it. FD is a
stream socket with a JSON object per line. The process writes ``{"ready": true}`` once; each order
``{"connector", "num_items", "num_tokens", "width", "dtype", "destination", "seed"}`` it reads is
one transfer of new embeddings, answered by seconds since they existed: ``sent_s`` when the producer
was done, ``usable_s`` when they were in the consumer's encoder cache, ``read_s`` when all had been
copied out of it once.

The process is the producer and forks the consumer. Both drive their connector by vLLM's hooks, in
the order in which an engine calls them. A connector that does not say itself when embeddings are
there is waited for by a message, as a router would send it. What arrived is compared by checksums,
after the clock has stopped.
"""

import hashlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from vllm.config import ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

from easerve.peer import Peer

NS_PER_S = 1e9
PUSHES = "PushConnector"  # says itself when embeddings are there
Order = dict[str, Any]
Embeddings = dict[str, torch.Tensor]


class Engine:
    """A connector's two halves, as an engine has them, without the engine."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        config = VllmConfig()
        # Given at once it would have to fit a model, of which connectors want nothing here.
        config.ec_transfer_config = ECTransferConfig(**settings)
        create = ECConnectorFactory.create_connector
        self._scheduler = create(config, ECConnectorRole.SCHEDULER)
        self._worker = create(config, ECConnectorRole.WORKER)
        self.pushes = settings["ec_connector"] == PUSHES

    def encode(self, request: Any, embeddings: Embeddings) -> int:
        """A step that has made these; since when they existed, in ns."""
        self._scheduler.ensure_cache_available(request, 0)
        for index in range(len(embeddings)):
            self._scheduler.update_state_after_alloc(request, index)
        self._worker.bind_connector_metadata(self._scheduler.build_connector_meta(_step(1)))
        encoder_cache: Embeddings = {}
        self._worker.start_save_caches(encoder_cache=encoder_cache)
        begin_ns = time.monotonic_ns()
        for key, embedding in embeddings.items():
            encoder_cache[key] = embedding
            self._worker.save_caches(encoder_cache, key)
        self._worker.get_finished(set())
        self._worker.clear_connector_metadata()
        return begin_ns

    def prefill(self, request: Any) -> Embeddings:
        """Steps until the request's embeddings are in the encoder cache, which is returned."""
        while not self._scheduler.ensure_cache_available(request, 0):
            if request.request_id in self._scheduler.take_unavailable_requests():
                raise TimeoutError(f"embeddings of {request.request_id} did not come")
            self._scheduler.build_connector_meta(_step(0))
        for index, feature in enumerate(request.mm_features):
            if not self._scheduler.has_cache_item(feature.identifier):
                raise LookupError(f"the connector has not got {feature.identifier}")
            self._scheduler.update_state_after_alloc(request, index)
        self._worker.bind_connector_metadata(self._scheduler.build_connector_meta(_step(1)))
        encoder_cache: Embeddings = {}
        self._worker.start_load_caches(encoder_cache)
        self._worker.clear_connector_metadata()
        return encoder_cache

    def finish(self, request: Any) -> None:
        """Of a consumer: the request has its answer."""
        request.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
        self._scheduler.request_finished(request)


def _step(num_tokens: int) -> Any:
    """A step of vLLM's scheduler, as far as connectors look at it."""
    return SimpleNamespace(total_num_scheduled_tokens=num_tokens, free_encoder_mm_hashes=[])


def _request(order: Order, **params: Any) -> Any:
    """A request of vLLM's scheduler, as far as connectors look at it: its items follow each other.

    No two orders have a seed in common, so keys are new.
    """
    length = order["num_tokens"]
    features = [
        SimpleNamespace(
            identifier=f"{order['connector']}-{order['seed']}-{index}",
            modality="image",
            mm_position=SimpleNamespace(offset=index * length, length=length),
        )
        for index in range(order["num_items"])
    ]
    return SimpleNamespace(
        request_id=f"{order['connector']}-{order['seed']}",
        mm_features=features,
        ec_transfer_params=params,
        status=SimpleNamespace(name="RUNNING"),
        get_num_encoder_embeds=lambda _: length,
    )


def _make(request: Any, order: Order) -> Embeddings:
    """Random bytes: what is sent must not compress, nor be zero pages."""
    generator = torch.Generator().manual_seed(order["seed"])
    dtype = getattr(torch, order["dtype"])
    size = order["num_tokens"], order["width"] * dtype.itemsize
    return {
        feature.identifier: torch.randint(256, size, dtype=torch.uint8, generator=generator).view(
            dtype
        )
        for feature in request.mm_features
    }


def _checksums(embeddings: Embeddings) -> dict[str, str]:
    def of(embedding: torch.Tensor) -> str:
        content = embedding.contiguous().view(torch.uint8).numpy()
        about = f"{embedding.dtype} {tuple(embedding.shape)} ".encode()
        return hashlib.blake2b(about + content.data, digest_size=16).hexdigest()

    return {key: of(embedding) for key, embedding in embeddings.items()}


def consume(peer: Peer, engines: Mapping[str, Engine]) -> None:
    """Be the prefill engine until the producer hangs up."""
    peer.send({"ready": True})
    while (order := receive(peer)) is not None:
        engine, request = (
            engines[order["connector"]],
            _request(order, coming=list(range(order["num_items"]))),
        )
        dtype = getattr(torch, order["dtype"])
        buffer = torch.empty((order["num_tokens"], order["width"]), dtype=dtype)
        buffer.view(torch.uint8).fill_(1)  # its pages are there before the clock starts
        peer.send({"ready": True})
        if not engine.pushes and receive(peer) is None:
            return
        encoder_cache = engine.prefill(request)
        usable_ns = time.monotonic_ns()
        for feature in request.mm_features:
            buffer.copy_(encoder_cache[feature.identifier])
        read_ns = time.monotonic_ns()
        engine.finish(request)
        checksums = _checksums(encoder_cache)
        encoder_cache.clear()
        peer.send({"usable_ns": usable_ns, "read_ns": read_ns, "checksums": checksums})


def transfer(order: Order, peer: Peer, engine: Engine) -> dict[str, float]:
    """One order, as the producer. Raises ValueError when other embeddings arrive than were sent."""
    request = _request(order, destinations=[[order["destination"]]] * order["num_items"])
    embeddings = _make(request, order)
    checksums = _checksums(embeddings)
    peer.send(order)
    _expect(peer)
    begin_ns = engine.encode(request, embeddings)
    sent_ns = time.monotonic_ns()
    if not engine.pushes:
        peer.send({"saved": True})
    seen = _expect(peer)
    if seen["checksums"] != checksums:
        raise ValueError(f"{request.request_id}: what arrived is not what was sent")
    ends_ns = {"sent_s": sent_ns, "usable_s": seen["usable_ns"], "read_s": seen["read_ns"]}
    return {name: (end_ns - begin_ns) / NS_PER_S for name, end_ns in ends_ns.items()}


def receive(peer: Peer) -> dict[str, Any] | None:
    """The next message of a peer that waits for an answer to each; None: it has hung up."""
    while (messages := peer.receive()) is not None:
        if messages:
            (message,) = messages
            return message
    return None


def _expect(peer: Peer) -> dict[str, Any]:
    message = receive(peer)
    if message is None:
        raise EOFError("the consumer has ended")
    return message


def _fork(main: Callable[[], None]) -> None:
    """Run it in a process of its own, which ends with it."""
    if os.fork():
        return
    try:
        main()
    except BaseException:
        traceback.print_exc()
        _exit(1)
    _exit(0)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    orders, settings = Peer(socket.socket(fileno=int(sys.argv[1]))), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    ours, theirs = socket.socketpair()

    def engines(role: str) -> dict[str, Engine]:
        return {name: Engine(roles[role]) for name, roles in settings.items()}

    def be_consumer() -> None:
        ours.close()
        orders.connection.close()
        consume(Peer(theirs), engines("consumer"))

    _fork(be_consumer)
    theirs.close()
    consumer, producers = Peer(ours), engines("producer")
    _expect(consumer)
    orders.send({"ready": True})
    while (order := receive(orders)) is not None:
        orders.send(transfer(order, consumer, producers[order["connector"]]))


if __name__ == "__main__":
    main()
