"""The pool of preparation workers: media are decoded in processes that may die."""

import asyncio
import contextlib
import os
import sys

import msgspec

from easerve.serve.media import HEADER, MEMORY_BYTES, Job, MediaError, Picture, Result

TIMEOUT_S = 30.0
PASSED_ON = ("LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH")  # no secrets to those who decode


class PreparationPool:
    """``num_workers`` processes, replaced when they die or hang; the last used is used first.

    ``options`` go into every key, see ``media.prepare``.
    """

    def __init__(self, num_workers: int, max_pixels: int, options: str = "") -> None:
        self._max_pixels, self._options = max_pixels, options
        self._idle: asyncio.Queue[asyncio.subprocess.Process | None] = asyncio.LifoQueue()
        for _ in range(num_workers):
            self._idle.put_nowait(None)
        self._all: set[asyncio.subprocess.Process] = set()

    async def prepare(self, url: str) -> Picture:
        """Decode one picture. Raises MediaError, also when the decoder dies of it."""
        worker = await self._idle.get()
        answered = False
        try:
            if worker is None or worker.returncode is not None:
                worker = await self._start()
            async with asyncio.timeout(TIMEOUT_S):
                result = await self._ask(worker, Job(url, self._max_pixels, self._options))
            answered = True
        except TimeoutError:
            raise MediaError(f"the picture could not be decoded in {TIMEOUT_S:g} s") from None
        except (ConnectionError, asyncio.IncompleteReadError):
            raise MediaError("the picture crashed its decoder") from None
        finally:
            if not answered and worker is not None:  # its pipe is in an unknown state
                self._kill(worker)
            self._idle.put_nowait(worker if answered else None)
        if result.picture is None:
            raise MediaError(result.error or "the picture cannot be used")
        return result.picture

    async def close(self) -> None:
        """End the workers."""
        for worker in list(self._all):
            self._kill(worker)
            await worker.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "easerve.serve.media", str(MEMORY_BYTES)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
            start_new_session=True,
        )
        self._all = {process for process in self._all if process.returncode is None}
        self._all.add(worker)
        return worker

    async def _ask(self, worker: asyncio.subprocess.Process, job: Job) -> Result:
        assert worker.stdin is not None
        assert worker.stdout is not None
        frame = msgspec.msgpack.encode(job)
        worker.stdin.write(HEADER.pack(len(frame)) + frame)
        await worker.stdin.drain()
        (length,) = HEADER.unpack(await worker.stdout.readexactly(HEADER.size))
        return msgspec.msgpack.decode(await worker.stdout.readexactly(length), type=Result)

    def _kill(self, worker: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
