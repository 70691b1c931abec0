"""Asking a prefill engine which items it does not have."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from easerve.engines.vllm.ec.messages import (
    MAX_ITEMS,
    MAX_MESSAGE_BYTES,
    VERSION,
    Hello,
    MessageError,
    Missing,
    Query,
    check_peer,
    decode,
    encode,
    new_socket,
)


async def missing_items(inbox: Path, token: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Those of ``keys`` that the engine does not have.

    Raises an OSError when the engine is gone or refuses, a MessageError when it talks nonsense.
    """
    loop = asyncio.get_running_loop()
    missing: list[str] = []
    with new_socket() as connection:
        connection.setblocking(False)
        connection.connect(str(inbox))  # at once, as on any Unix socket
        check_peer(connection)
        await loop.sock_sendall(connection, encode(Hello(VERSION, token)))
        for begin in range(0, len(keys), MAX_ITEMS):
            query = Query(tuple(keys[begin : begin + MAX_ITEMS]))
            await loop.sock_sendall(connection, encode(query))
            packet = await loop.sock_recv(connection, MAX_MESSAGE_BYTES)
            if not packet:
                raise ConnectionResetError("the engine hung up")
            reply = decode(packet)
            if not isinstance(reply, Missing):
                raise MessageError(f"{type(reply).__name__} is no answer")
            missing += reply.keys
    return tuple(missing)
