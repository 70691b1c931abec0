"""``/admin``: the knobs of the control policies, read and changed while serving."""

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from easerve.config import Policy, explain, merge
from easerve.policy.knobs import Knobs, Order
from easerve.serve.driver import Driver
from easerve.serve.errors import ApiError

NO_LOCAL = (
    "remote_share: {:g} needs a section local_prefill in the deployment file: without it there is "
    "nothing but the remote engines"
)
logger = logging.getLogger("easerve.admin")


def knobs_of(policy: Policy) -> Knobs:
    """The policies of a deployment as the core takes them."""
    return Knobs(**{**policy.model_dump(), "order": Order(policy.order)})


class Admin:
    """Holds the policy in force. ``has_local``: the deployment has local prefill engines."""

    def __init__(self, policy: Policy, driver: Driver, has_local: bool) -> None:
        self._policy, self._driver, self._has_local = policy, driver, has_local

    def knobs(self) -> dict[str, Any]:
        return self._policy.model_dump()

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
        self._policy = policy
        self._driver.turn(knobs_of(policy))
        after = self.knobs()
        changed = {name: after[name] for name in after if after[name] != before[name]}
        for name, value in changed.items():
            logger.warning("knob %s changed from %s to %s", name, before[name], value)
        return after
