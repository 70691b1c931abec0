"""The table of docs/validation.md, from what ``easerve bench twin --json`` has printed.

Run as ``python -m scripts.validation_table RESULT.json docs/validation.md``; what stands between
the two markers of the page is written anew: the command that made the result, and its figures.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table: scripts/validation_table.py -->", "<!-- end of table -->"
TIMES = {
    "ttft_s.mean": "TTFT mean",
    "ttft_s.p50": "TTFT P50",
    "ttft_s.p99": "TTFT P99",
    "tpot_s.mean": "TPOT mean",
    "tpot_s.p50": "TPOT P50",
    "tpot_s.p99": "TPOT P99",
}
MEASURED = "measured in this run"
"""What a result says of its profile if none was given."""
MOST_OTHERS_CORES = 0.1
"""With more of them a column is not usable."""


def main() -> None:
    result, page = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    try:
        table = "\n".join((BEGIN, *lines(result), END))
    except KeyError as error:
        sys.exit(f"{sys.argv[1]}: easerve bench twin --json of today writes {error} as well")
    text, num = re.subn(f"{BEGIN}.*{END}", lambda _: table, page.read_text(), flags=re.DOTALL)
    if num != 1:
        sys.exit(f"{page}: expected one place between {BEGIN} and {END}")
    page.write_text(text)


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Measured · simulated · error, a column for each rate."""
    rows = result["rates"]
    yield f"Made by `{command(result)}`:"
    yield ""
    sides = f"{result['num_requests']} requests at each rate on {result['num_cores']} cores"
    yield f"{sides}; costs: {result['profile']}."
    yield "Times in ms; each cell: measured · simulated · error."
    if unusable := [row for row in rows if not _usable(row)]:
        yield (
            f"**Not usable**: {len(unusable)} of {len(rows)} columns, during which other processes "
            f"took more than {MOST_OTHERS_CORES:g} cores."
        )
    yield ""
    yield _row(
        "", [f"{row['rate_per_s']:g}/s{'' if _usable(row) else ', not usable'}" for row in rows]
    )
    yield "|---" * (len(rows) + 1) + "|"
    for name, label in TIMES.items():
        yield _row(label, [_cell(row, name, 1e3) for row in rows])
    yield _row("requests/s", [_cell(row, "throughput_per_s", 1) for row in rows])
    for stage in ("encode", "prefill", "decode"):
        yield _row(f"{stage} busy, %", [_cell(row, f"busy.{stage}", 100) for row in rows])
    yield _row("engines' speed", [_speed(row) for row in rows])
    yield _row("others' cores", [f"{row['others_cores']:.2f}" for row in rows])


def command(result: dict[str, Any]) -> str:
    rounds = result["rounds"]
    rates = ",".join(f"{row['rate_per_s']:g}" for row in result["rates"])
    asked = f"--requests {result['num_requests'] // rounds} --rounds {rounds}"
    path = result["profile"].partition(",")[0]
    profile = "" if path == MEASURED else f" --profile {path}"
    seed = result["seed"]
    return f"easerve bench twin --rates {rates} {asked} --seed {seed}{profile} --json"


def _usable(row: dict[str, Any]) -> bool:
    return bool(row["others_cores"] <= MOST_OTHERS_CORES)


def _row(label: str, cells: Iterable[str]) -> str:
    return f"| {label} | {' | '.join(cells)} |"


def _cell(row: dict[str, Any], name: str, scale: float) -> str:
    values = (row[side][name] for side in ("measured", "simulated"))
    shown = ("–" if value is None else f"{scale * value:.3g}" for value in values)
    error = row["error"][name]
    return " · ".join((*shown, "–" if error is None else f"{100 * error:+.0f} %"))


def _speed(row: dict[str, Any]) -> str:
    """Just before the run, of that in the profile."""
    return f"{1 / row['slower']:.2f}"


if __name__ == "__main__":
    main()
