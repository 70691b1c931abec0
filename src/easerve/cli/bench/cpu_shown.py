"""Results of ``easerve bench cpu`` as tables, charts and sentences that follow from the numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from easerve.bench.report import Cell, Chart, Section, Series, Spans, Table
from easerve.cli.bench.cpu_rows import ALONE, IN_RUN
from easerve.cli.bench.cpu_said import BEST, PASS, base_of, conclusions, disturbed, middle

Result = dict[str, Any]
SHOWN_S, MEAN_S = 1.0, 0.02
"""Of a timeline: what can be told apart on a page."""


def sections(result: Result) -> list[Section]:
    return [
        Section("What came of it", "\n\n".join(conclusions(result)), alert=disturbed(result)),
        _throughput(result),
        *(_allowed(result, against) for against in (PASS, BEST)),
        _costs(result),
        _busy(result),
        _promises(result),
        *(_timeline(each) for each in result["timelines"]),
        _conditions(result),
    ]


def _label(mix: Mapping[str, Any]) -> str:
    return f"{mix['num_images']} x {mix['num_tokens']}"


def _throughput(result: Result) -> Section:
    names = result["systems"]
    rows = [
        [_label(mix), *(round(mix["systems"][n]["throughput_per_s"], 1) for n in names)]
        for mix in result["mixes"]
    ]
    x = [_label(mix) for mix in result["mixes"]]
    series = [_with_range(result, name, x) for name in names]
    text = (
        f"{result['concurrency']} clients, each with a request open all the time; all of "
        f"{result['rounds']} rounds in which the systems took turns. Mix: pictures x tokens of "
        "an answer. vLLM: plain engines that do everything, as many as the name says. Passthrough: "
        "EAServe as today's proxies do it, one encode call for each picture. When, Where, How: "
        "that, and one mechanism alone; How divides the device of what Where puts there, so "
        "it is both. all: all mechanisms."
    )
    title = "Requests/s when every core is busy"
    chart = Chart(f"{title}; whiskers: all rounds", "mix", "requests/s", series, kind="bar")
    return Section("Throughput", text, [Table(title, ("mix", *names), rows), chart])


def _with_range(result: Result, name: str, x: Sequence[str]) -> Series:
    runs = [mix["systems"][name] for mix in result["mixes"]]
    return Series(
        name,
        x,
        [run["throughput_per_s"] for run in runs],
        low=[min(run["throughputs_per_s"]) for run in runs],
        high=[max(run["throughputs_per_s"]) for run in runs],
    )


def _allowed(result: Result, against: str) -> Section:
    """A row for each mix and system that is compared with this one."""
    rows: list[Sequence[Cell]] = []
    for mix in result["mixes"]:
        base = base_of(mix, against)
        for name, each in mix["ratios"][base].items():
            low, high = _range(mix, name, base)
            rows.append(
                (
                    f"{_label(mix)}, {name}",
                    f"{each['measured']:.2f}",
                    f"{low:.2f}-{high:.2f}",
                    *(word for by in (IN_RUN, ALONE) for word in _verdict(each[by])),
                )
            )
    text = (
        "Ratios of requests/s. In the run: what the stages' CPU times in these runs allow, with as "
        "many cores busy as a system keeps busy while its stages are measured alone. Alone: by "
        "what each stage costs while nothing else runs, in portions as in the run; an engine that "
        "does everything does one thing after the other. Reached: measured over allowed; ! is more "
        "than 10 % off."
    )
    if against == BEST:
        best = ", ".join(f"{_label(mix)}: {mix['best_vllm']}" for mix in result["mixes"])
        text = f"Whichever of the two answers most, {best}. {text}"
    columns = ("mix, system", "ratio", "rounds", "in the run", "reached", "alone", "reached")
    return Section(f"Against {against}", text, [Table(f"Against {against}", columns, rows)])


def _verdict(found: Mapping[str, Any]) -> tuple[str, str]:
    mark = "" if found["as_allowed"] else " !"
    return f"{found['allowed']:.2f}", f"{found['reached']:.2f}{mark}"


def _range(mix: Mapping[str, Any], name: str, against: str) -> tuple[float, float]:
    """Of the ratios in each round."""
    ours, theirs = (mix["systems"][each]["throughputs_per_s"] for each in (name, against))
    found = [a / b for a, b in zip(ours, theirs, strict=True)]
    return min(found), max(found)


def _costs(result: Result) -> Section:
    """By process, for the mix in the middle: in the run, and by the stages alone."""
    mix = middle(result)
    names = list(mix["predicted"])
    run = {name: mix["systems"][name]["by_process"] for name in names}
    alone = {name: mix["predicted"][name]["by_process"] for name in names}
    text = (
        "Of an engine two processes: its server (HTTP, tokens, pictures) and its core, which runs "
        "the model. Ours are several engines, plain vLLM's are alike and counted together."
    )
    title = f"CPU ms of a request, {_label(mix)}"
    tables = [
        _cost_table(f"{title}, {how}", each) for how, each in (("run", run), ("alone", alone))
    ]
    return Section("Where the time goes", text, [*tables, _cost_chart(title, run)])


def _processes(costs: Mapping[str, Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(process for each in costs.values() for process in each))


def _cost_table(title: str, costs: Mapping[str, Mapping[str, float]]) -> Table:
    rows: list[Sequence[Cell]] = [
        (process, *(_ms(each.get(process)) for each in costs.values()))
        for process in _processes(costs)
    ]
    rows.append(("all", *(_ms(sum(each.values())) for each in costs.values())))
    return Table(title, ("process", *costs), rows)


def _cost_chart(title: str, costs: Mapping[str, Mapping[str, float]]) -> Chart:
    series = [
        Series(process, list(costs), [_ms(each.get(process)) for each in costs.values()])
        for process in _processes(costs)
    ]
    return Chart(f"{title}, run", "system", "ms", series, kind="bar")


def _busy(result: Result) -> Section:
    """Cores that every process used, for the mix in the middle."""
    mix = middle(result)
    names = list(mix["systems"])
    cores = {
        name: {p: each * run["throughput_per_s"] for p, each in run["used_s"].items()}
        for name, run in mix["systems"].items()
    }
    rows: list[Sequence[Cell]] = [
        (process, *(_share(cores[name].get(process)) for name in names))
        for process in _processes(cores)
    ]
    rows.append(("all", *(_share(sum(cores[name].values())) for name in names)))
    text = (
        f"Share of a core that each process was busy, of {result['num_cores']} cores; by the "
        "scheduler's own count, to the nanosecond. What is lacking: requests were waiting for each "
        "other, or other processes had the cores."
    )
    return Section("Busy engines", text, [Table(f"Busy, {_label(mix)}", ("process", *names), rows)])


def _promises(result: Result) -> Section:
    slo = result["slo"]
    tiers = list(slo["slo"])
    rows: list[Sequence[Cell]] = [
        (
            f"{row['rate_per_s']:.1f}/s, {row['system']}",
            *(round(row["goodput_per_s"][tier], 1) for tier in tiers),
            _ms(row["ttft_s"]["p50"]),
            _ms(row["ttft_s"]["p99"]),
            _ms(row["tpot_s"]["p99"]),
            row["not_completed"],
        )
        for row in slo["rows"]
    ]
    alone = slo["reference"]
    limits = "; ".join(
        f"{tier} {1e3 * each['ttft_s']:.0f} and {1e3 * each['tpot_s']:.1f} ms"
        for tier, each in slo["slo"].items()
    )
    text = (
        f"Poisson arrivals of mix {slo['shape'].replace('x', ' x ')}, at {slo['load']:g} of what "
        "passthrough, then all mechanisms answer when every core is busy. Tiers are multiples of "
        f"what a request alone takes on {alone['system']}, measured in this run and the same for "
        f"all systems: {1e3 * alone['ttft_s']:.1f} ms to the first token, "
        f"{1e3 * alone['tpot_s']:.2f} ms for each other one. Limits: {limits}."
    )
    columns = ("rate, system", *tiers, "TTFT p50", "p99", "TPOT p99", "lost")
    table = Table("Requests/s within the limits of a tier; times in ms", columns, rows)
    return Section("Goodput", text, [table])


def means(
    times_s: Sequence[float], shares: Sequence[float], end_s: float
) -> tuple[list[float], list[float]]:
    """Where periods of ``MEAN_S`` or a little more begin, and the mean of each.

    A single sample says little: the kernel books a thread's time now and then, not always.
    """
    begins: list[float] = []
    found: list[float] = []
    begin_s = before_s = used_s = 0.0
    for time_s, share in zip(times_s, shares, strict=True):
        used_s += share * (time_s - before_s)
        before_s = time_s
        if time_s - begin_s >= MEAN_S:
            begins.append(begin_s)
            found.append(round(used_s / (time_s - begin_s), 3))
            begin_s, used_s = time_s, 0.0
        if begin_s > end_s:
            break
    return begins, found


def _timeline(seen: Result) -> Section:
    beside = seen["beside"]
    calls = Chart(
        f"Calls, how: {seen['how']}",
        "s",
        "",
        [_spans_of(name, spans) for name, spans in seen["calls"].items()],
        kind="spans",
        x_range=(0.0, SHOWN_S),
        aligned=True,
    )
    busy = Chart(
        f"Cores that an engine uses, means of {1e3 * MEAN_S:g} ms, how: {seen['how']}",
        "s",
        "cores",
        [
            Series(name, *means(seen["times_s"], shares, SHOWN_S))
            for name, shares in seen["busy"].items()
        ],
        kind="step",
        x_range=(0.0, SHOWN_S),
        aligned=True,
    )
    rows: list[Sequence[Cell]] = [
        ("an encoder ran", _share(beside["encode"])),
        ("prefill ran", _share(beside["prefill"])),
        ("both ran", _share(beside["both"])),
        ("prefill ran, of when an encoder ran", _share(beside["of_encode"])),
        ("a prefill was open, of when an encode was", _share(beside["calls"])),
    ]
    text = (
        f"Mix {seen['shape'].replace('x', ' x ')}, {seen['rate_per_s']:.1f} requests/s, all "
        f"mechanisms, rule {seen['how']}. A prefill call counts from when its embeddings are "
        "there. The upper chart is calls as the router sees them, the lower one what the first "
        "threads of an engine's server and core used, seen every 2 ms; an engine ran when that "
        "was half a core."
    )
    table = Table("Share of the time", ("", "share"), rows)
    return Section(f"Encode beside prefill, how: {seen['how']}", text, [table, calls, busy])


def _spans_of(name: str, spans: Sequence[Sequence[float]]) -> Spans:
    shown = [(begin, end) for begin, end in spans if begin <= SHOWN_S]
    begins, ends = [begin for begin, _ in shown], [end for _, end in shown]
    return Spans(name, [name] * len(shown), begins, ends)


def _conditions(result: Result) -> Section:
    others = [run["others_cores"] for mix in result["mixes"] for run in mix["systems"].values()]
    tried = ", ".join(f"{s}: {n:.1f}/s" for s, n in result["remote_share"]["tried"].items())
    text = (
        f"{result['model']} on {result['machine']}, EAServe {result['easerve']}, {result['made']}. "
        f"Other processes used {min(others):.2f} to {max(others):.2f} cores during the runs. "
        f"Remote share {result['remote_share']['chosen']:g}"
        + (f", the best of {tried}." if tried else ".")
        + " All engines may use all cores, one thread each but for the single vLLM engine, which "
        "has one for each core, and encode and local prefill, which divide them. While one "
        "system was measured the engines of the others were stopped. Every client is a process "
        "of its own and counted."
    )
    rows: list[Sequence[Cell]] = [
        (name, round(each, 4)) for name, each in result["idle_cores"].items()
    ]
    return Section(
        "Conditions",
        text,
        [Table("Cores that engines use with nothing to do", ("process", "cores"), rows)],
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)


def _share(share: float | None) -> float | None:
    return None if share is None else round(share, 2)
