"""Which models a server has, before it is asked for anything else."""

import aiohttp
import msgspec
from yarl import URL

from easerve.bench.answer import UNREADABLE, message_of
from easerve.bench.client import LoadError
from easerve.bench.job import endpoint
from easerve.config import ConfigError

TIMEOUT_S = 30.0
MISSING = (404, 405, 501)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def served(url: str, api_key: str | None = None) -> list[str] | None:
    """By name; None for a server that does not tell.

    Raises LoadError for a server that cannot be reached or refuses, ValueError for what is no HTTP
    address.
    """
    route = models_url(url)
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(route) as response,
        ):
            content = await response.read()
    except TimeoutError:
        raise LoadError(f"{route}: no answer within {TIMEOUT_S:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise LoadError(f"{route}: {error}: is the server up?") from None
    if response.status in MISSING:
        return None
    if response.status != 200:
        raise LoadError(f"{route}: HTTP {response.status}: {message_of(content)}")
    try:
        return [model.id for model in msgspec.json.decode(content, type=_Models).data]
    except UNREADABLE:
        return None


def models_url(url: str) -> str:
    """Where a server tells its models, whatever route of it ``url`` names."""
    route = URL(endpoint(url))
    path = route.path.removesuffix("/completions").removesuffix("/chat")
    return str(route.with_path(f"{path}/models"))


def chosen(given: str | None, models: list[str] | None) -> str:
    """The model to ask. Raises ConfigError for one that is not there, or when it is not clear."""
    if given is None:
        if models is None:
            raise ConfigError("the server does not tell its models: name one with --model")
        if len(models) != 1:
            names = ", ".join(models) or "none"
            raise ConfigError(f"name a model with --model; the server has {names}")
        return models[0]
    if models is not None and given not in models:
        raise ConfigError(f"--model {given}: the server has {', '.join(models) or 'none'}")
    return given
