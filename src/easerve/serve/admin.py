"""``/admin``: the knobs of the control policies, read and changed while serving."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from easerve.config import PARTITION_KNOBS, Deployment, Policy, explain, merge
from easerve.policy.adapt import ADAPTED
from easerve.policy.knobs import Knobs, Order
from easerve.serve.driver import Driver
from easerve.serve.errors import ApiError

NO_LOCAL = (
    "remote_share: {:g} needs a section local_prefill in the deployment file: without it there is "
    "nothing but the remote engines"
)
NO_PARTITION = (
    "{}: needs a section partition in the deployment file: without it encode and local prefill "
    "share all of their device"
)
logger = logging.getLogger("easerve.admin")


def knobs_of(policy: Policy) -> Knobs:
    """The policies of a deployment as the core takes them."""
    return Knobs(**{**policy.model_dump(), "order": Order(policy.order)})


class Admin:
    """Holds the policy in force."""

    def __init__(self, deployment: Deployment, driver: Driver) -> None:
        self._policy, self._driver = deployment.policy, driver
        self._has_local = deployment.local_prefill is not None
        self._divides = deployment.partition is not None

    def knobs(self) -> dict[str, Any]:
        """As they were configured."""
        return self._policy.model_dump()

    def state(self) -> dict[str, Any]:
        """What is served by whom now, the knobs in force, and how devices are divided."""
        driver = self._driver
        in_force = {name: getattr(driver.core.knobs, name) for name in ADAPTED}
        return {
            "knobs": self.knobs() | in_force,
            "open": driver.core.num_open,
            "queues": {str(stage): n for stage, n in driver.core.queue_lengths().items()},
            "engines": {
                worker.worker_id: {
                    "stage": worker.stage,
                    "beside": worker.beside,
                    "backlog_tokens": worker.backlog_tokens,
                }
                for worker in driver.core.pool
            },
            "partition": {name: asdict(each) for name, each in driver.divisions.items()},
        }

    def change(self, content: Any) -> dict[str, Any]:
        """Lay ``content`` over the knobs: all of it or, if anything is wrong, nothing.

        In force when this returns. Raises ApiError with the path of the key at fault.
        """
        if not isinstance(content, Mapping):
            raise ApiError(400, "The body must be an object of knobs")
        before = self.knobs()
        try:
            policy = Policy.model_validate(merge(before, content), strict=True)
        except ValidationError as error:
            lines = explain(error, Policy)
            raise ApiError(400, "; ".join(lines), lines[0].partition(":")[0]) from None
        if policy.remote_share < 1 and not self._has_local:
            raise ApiError(400, NO_LOCAL.format(policy.remote_share), "remote_share")
        turned = [key for key in sorted(PARTITION_KNOBS) if getattr(policy, key) != before[key]]
        if turned and not self._divides:
            raise ApiError(400, NO_PARTITION.format(turned[0]), turned[0])
        self._policy = policy
        self._driver.turn(knobs_of(policy))
        after = self.knobs()
        changed = {name: after[name] for name in after if after[name] != before[name]}
        for name, value in changed.items():
            logger.warning("knob %s changed from %s to %s", name, before[name], value)
        return after
