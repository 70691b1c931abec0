"""Servers over fake engines; a test that uses one must leave nothing behind in it."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

import pytest

from easerve.config import Deployment
from easerve.costs.linear import LinearCosts
from easerve.engines.fake import INSTANT
from easerve.serve.decisions import StepLog
from easerve.serve.preparation import PreparationPool

from .server import MODEL, ONE_OF_EACH, Server


class Serve(Protocol):
    """Starts a server. ``limits``, ``server``, ``engine``, ``policy`` and ``partition``: of the
    deployment.

    With an ``l0`` among its engines the deployment has local prefill engines.
    """

    async def __call__(
        self,
        engines: Sequence[str] = ONE_OF_EACH,
        limits: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        costs: LinearCosts = INSTANT,
        preparation: PreparationPool | None = None,
        engine: dict[str, Any] | None = None,
        policy: dict[str, Any] | None = None,
        log: StepLog | None = None,
        partition: dict[str, Any] | None = None,
    ) -> Server: ...


@pytest.fixture
async def serve(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(
            engines: Sequence[str] = ONE_OF_EACH,
            limits: dict[str, Any] | None = None,
            server: dict[str, Any] | None = None,
            costs: LinearCosts = INSTANT,
            preparation: PreparationPool | None = None,
            engine: dict[str, Any] | None = None,
            policy: dict[str, Any] | None = None,
            log: StepLog | None = None,
            partition: dict[str, Any] | None = None,
        ) -> Server:
            sections = {"limits": limits, "server": server, "engine": engine, "policy": policy}
            has_local = any(name.startswith("l") for name in engines)
            content = {
                "model": MODEL,
                "local_prefill": {} if has_local else None,
                "partition": partition,
                **{name: each or {} for name, each in sections.items()},
            }
            deployment = Deployment.model_validate(content)
            started = Server(deployment, engines, costs, preparation, log)
            await started.start()
            stack.push_async_callback(started.stop)
            stack.push_async_callback(started.idle)
            return started

        yield start
    unexpected = [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.levelno >= logging.ERROR and record.name in ("uvicorn.error", "asyncio")
    ]
    assert unexpected == []


@pytest.fixture
async def server(serve: Serve) -> Server:
    """One engine of each stage, default limits."""
    return await serve()
