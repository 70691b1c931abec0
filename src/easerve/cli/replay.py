"""``easerve replay``: a decision log decided again by this version's core."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from easerve import __version__
from easerve.serve.decisions import Batches, Difference, Outcome, replay


def run(path: Path, as_json: bool) -> int:
    """The exit code: 1 when the actions differ. Raises DecisionLogError."""
    outcome = replay(path)
    if as_json:
        print(json.dumps(_report(outcome)))
    else:
        _print(outcome, Console(soft_wrap=True, highlight=False, markup=False))
    return 0 if outcome.difference is None else 1


def _report(outcome: Outcome) -> dict[str, Any]:
    difference = outcome.difference
    return {
        "same": difference is None,
        "num_steps": outcome.num_steps,
        "num_events": outcome.num_events,
        "num_actions": outcome.num_actions,
        "batches": {reason: _means(each) for reason, each in sorted(outcome.batches.items())},
        "truncated": outcome.truncated,
        "difference": None if difference is None else asdict(difference),
    }


def _means(batches: Batches) -> dict[str, float]:
    return {
        "count": batches.count,
        "mean_items": batches.num_items / batches.count,
        "mean_wait_s": batches.wait_s / batches.count,
    }


def _print(outcome: Outcome, console: Console) -> None:
    table = Table("closed by", title="Encode batches")
    for heading in ("batches", "mean items", "mean wait (ms)"):
        table.add_column(heading, justify="right")
    for reason, each in sorted(outcome.batches.items()):
        means = _means(each)
        wait_ms = 1e3 * means["mean_wait_s"]
        table.add_row(reason, f"{each.count:,}", f"{means['mean_items']:.2f}", f"{wait_ms:,.1f}")
    if outcome.batches:
        console.print(table)
    console.print(
        f"{outcome.num_steps:,} steps, {outcome.num_events:,} events, "
        f"{outcome.num_actions:,} actions, {outcome.num_batches:,} encode batches"
    )
    if outcome.truncated:
        console.print("The last line is cut off: the server was killed, or is still running.")
    if outcome.difference is None:
        console.print("The core decides the same actions.")
        return
    console.print("\n".join(_explain(outcome.difference)))
    if outcome.header.easerve != __version__:
        console.print(f"The log was written by easerve {outcome.header.easerve}.")


def _explain(difference: Difference) -> Sequence[str]:
    """The step, and the first action in it that is not the same."""
    where = f"line {difference.line}, step {difference.step}, at {difference.now_ns} ns"
    if isinstance(difference.got, str):
        return f"The core fails ({where}):", f"  {difference.got}"
    pairs = zip_longest(difference.expected, difference.got)
    expected, got = next((one, other) for one, other in pairs if one != other)
    return (
        f"The core decides otherwise ({where}):",
        f"  expected: {_action(expected, got)}",
        f"  got:      {_action(got, expected)}",
    )


def _action(action: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """As in Python; lists and the like that the other has as well are left out."""
    if action is None:
        return "no further action"
    common = {
        key: "…"
        for key, value in action.items()
        if isinstance(value, list | dict) and other is not None and other.get(key) == value
    }
    shown = {key: common.get(key) or json.dumps(value) for key, value in action.items()}
    fields = ", ".join(f"{key}={value}" for key, value in shown.items() if key != "action")
    return f"{action['action']}({fields})"
