"""Results of ``easerve bench transfer`` as tables and pictures."""

from collections.abc import Iterator, Sequence

from easerve.bench.report import Chart, Section, Series, Table
from easerve.cli.bench.encode import Result
from easerve.cli.bench.transfer import GOAL_ITEMS, GOAL_RATIO, PUSH

SPREAD = "Times are in ms: median (lower – upper quartile)."
DATA = (
    "Since the embeddings existed. usable: in the consumer's encoder cache; sent: the producer may "
    "go on; read: usable and copied out once; GB/s: bytes by the median of usable."
)
FILES = (
    "Files are neither synced nor kept: the kernel's page cache has them, no disk is waited for."
)
ENGINES = (
    "first token: from the encode call; encode: until the encoder answered; wait: of prefill for "
    f"embeddings. {PUSH} dispatches prefill together with encode, which no other can."
)


def of_transfer(result: Result) -> list[Section]:
    """Every part that was run."""
    makers = {"data": _data, "engines": _engines}
    return [make(result) for part, make in makers.items() if part in result]


def _data(result: Result) -> Section:
    rows = [
        (
            f"{row['num_items']} {row['case']}, {row['connector']}",
            f"{row['num_bytes'] / 1e6:.3g}",
            _spread(row["usable_s"]),
            _median(row["sent_s"]),
            _median(row["read_s"]),
            f"{row['bytes_per_s'] / 1e9:.2f}",
        )
        for row in result["data"]
    ]
    columns = ("embeddings, connector", "MB", "usable", "sent", "read", "GB/s")
    disk = result["disk"]
    text = (
        f"{SPREAD} {DATA} The disk's folder is in {disk['folder']} ({disk['file_system']}). {FILES}"
        f" {_others(result['data_others_cores'])}"
    )
    cases = dict.fromkeys(row["case"] for row in result["data"])
    charts = [
        Chart(
            f"Until {case} embeddings can be read, median",
            "embeddings at once",
            "ms",
            list(_lines([row for row in result["data"] if row["case"] == case], "connector")),
        )
        for case in cases
    ]
    table = Table("From the encoder's output to prefill's encoder cache", columns, rows)
    return Section("Data plane", text, [table, *charts])


def _engines(result: Result) -> Section:
    rows = [
        (
            f"{row['num_items']}, {row['system']}",
            _spread(row["first_token_s"]),
            _median(row["encode_s"]),
            _median(row["wait_s"]),
        )
        for row in result["engines"]
    ]
    columns = ("pictures, system", "first token", "encode", "wait")
    table = Table("From the encode call to prefill's first token", columns, rows)
    lines = list(_lines(result["engines"], "system"))
    chart = Chart("First token, median", "pictures in the request", "ms", lines)
    ratios = [
        (
            each["num_items"],
            each["example"],
            round(each["ratio"], 3),
            "{median:.3f} ({low:.3f} – {high:.3f})".format(**each["ratio_in_round"]),
        )
        for each in result["ratios"]
    ]
    columns = ("pictures", "the better example", "of medians", "within a round")
    compared = Table(f"{PUSH} over the better example", columns, ratios)
    text = f"{SPREAD} {ENGINES} {_others(result['engines_others_cores'])} {_verdict(result)}"
    return Section("Engines", text, [table, compared, chart])


def _others(cores: float) -> str:
    return f"Meanwhile other processes used {cores:.2f} cores."


def _verdict(result: Result) -> str:
    if "ratio" not in result:
        return ""
    ratio = result["ratio"]
    met = "as" if ratio <= GOAL_RATIO else "not as"
    return (
        f"With {GOAL_ITEMS} pictures {PUSH} takes {ratio:.3f} times as long as the better example, "
        f"{met} aimed at (at most {GOAL_RATIO})."
    )


def _lines(rows: Sequence[Result], by: str) -> Iterator[Series]:
    time = "read_s" if by == "connector" else "first_token_s"
    for name in dict.fromkeys(row[by] for row in rows):
        of_name = [row for row in rows if row[by] == name]
        x = [row["num_items"] for row in of_name]
        yield Series(name, x, [1e3 * row[time]["median"] for row in of_name])


def _spread(spread: Result) -> str:
    middle, low, high = (_ms(spread[name]) for name in ("median", "low", "high"))
    return f"{middle} ({low} – {high})"


def _median(spread: Result | None) -> str | None:
    return None if spread is None else _ms(spread["median"])


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.{2 if milliseconds < 10 else 1}f}"
