"""What the doctor says of one thing."""

from dataclasses import dataclass

OK, WARN, BAD = "ok", "warn", "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """``status``: ok, warn (works, worse) or bad (cannot serve). ``hint``: what mends it."""

    name: str
    status: str
    found: str
    hint: str = ""
