"""How a command ends when it cannot go on."""

import sys
from typing import NoReturn

import typer

USAGE_ERROR = 2


def fail(message: object, code: int = 1) -> NoReturn:
    """End with an error a person can act on."""
    print(f"easerve: {message}", file=sys.stderr)
    raise typer.Exit(code)
