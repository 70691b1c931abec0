"""The scripted server on a loop of its own, in a thread, for commands that run in this one."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.scripted import Script, Scripted, serving


@contextmanager
def scripted(*steps: str, ttft_s: float = 0.01, tpot_s: float = 0.002) -> Iterator[Scripted]:
    """Answers of four tokens."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    serves = serving(Script(steps or ("ok",), ttft_s, tpot_s, 4))
    try:
        yield asyncio.run_coroutine_threadsafe(serves.__aenter__(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(serves.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
