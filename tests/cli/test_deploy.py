"""What a deployment is made into: the recipe of its core, and what makes a picture's key."""

import os
from pathlib import Path
from typing import Any

import pytest

from easerve.cli.deploy import _make_driver, check, embedding_options, recipe
from easerve.config import ConfigError, Deployment, Policy
from easerve.policy.batching import RULES
from easerve.policy.knobs import Knobs, Order
from easerve.serve.admin import knobs_of
from easerve.serve.media import prepare
from easerve.types import NS_PER_S

from ..serve.server import MAX_PIXELS, picture

RED = picture("red")


def deployment(**content: Any) -> Deployment:
    return Deployment.model_validate({"model": "m", **content})


def key(made: Deployment) -> str:
    return prepare(RED, MAX_PIXELS, embedding_options(made)).key


# The core -----------------------------------------------------------------------------------------


def test_the_core_is_made_as_the_deployment_says() -> None:
    limits = {"max_requests": 7, "max_held": 1000, "max_retries": 1, "worker_wait_s": 0.5}
    made = recipe(deployment(limits=limits, policy={"when": "gap", "order": "deadline"}))
    assert (made.admission.max_requests, made.admission.max_bytes) == (7, 1000)
    assert (made.limits.max_retries, made.limits.worker_wait_ns) == (1, NS_PER_S // 2)
    assert made.knobs == made.make_core().knobs
    assert (made.knobs.when, made.knobs.order) == ("gap", Order.DEADLINE)


@pytest.mark.parametrize("when", RULES)
def test_every_rule_makes_a_core(when: str) -> None:
    assert recipe(deployment(policy={"when": when})).make_core().knobs.when == when


def test_every_knob_is_the_policys() -> None:
    policy = Policy(order="deadline", timeout_s=0.5, ttft_slo_s=1, max_batch_items=3, flow=False)
    knobs = knobs_of(policy)
    assert isinstance(knobs.order, Order)
    own = {name: getattr(knobs, name) for name in Knobs.__slots__}
    assert own == policy.model_dump()


# What can run here --------------------------------------------------------------------------------


def test_cores_that_are_not_there_are_an_error(model: Path) -> None:
    own = min(os.sched_getaffinity(0))
    content = {"model": str(model), "local_prefill": {}}
    check(deployment(**content, encode={"cores": [[own]]}))
    with pytest.raises(ConfigError, match=r"cores \[4095\]: this process cannot run on them"):
        check(deployment(**content, encode={"cores": [[own, 4095]]}))


# Keys of pictures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"engine": {"dtype": "float32"}},
        {"engine": {"mm_processor_kwargs": {"max_pixels": 1000}}},
        {"engine": {"mm_processor_kwargs": {"max_pixels": 1001}}},
        {"engine": {"mm_processor_kwargs": {"max_pixels": "1000"}}},
        {"engine": {"mm_processor_kwargs": {"a": {"max_pixels": 1000}}}},
    ],
    ids=str,
)
def test_what_changes_an_embedding_changes_its_key(other: dict[str, Any]) -> None:
    keys = {key(deployment()), key(deployment(**other)), prepare(RED, MAX_PIXELS).key}
    assert len(keys) == 3


def test_what_does_not_change_an_embedding_does_not_change_its_key() -> None:
    one, same = ({"b": 1, "a": {"d": 2, "c": 3}}, {"a": {"c": 3, "d": 2}, "b": 1})
    assert key(deployment(engine={"mm_processor_kwargs": one})) == key(
        deployment(
            engine={"mm_processor_kwargs": same, "max_model_len": 512},
            served_model_name="short",
            policy={"when": "none"},
        )
    )


async def test_the_server_prepares_pictures_with_the_options_of_its_deployment() -> None:
    made = deployment(engine={"mm_processor_kwargs": {"max_pixels": 1000}})
    driver = _make_driver(made, None)
    try:
        assert (await driver._preparation.prepare(RED)).key == key(made) != key(deployment())
    finally:
        await driver.close()
