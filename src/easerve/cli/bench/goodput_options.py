"""The options of ``easerve bench goodput`` and ``bench reference``."""

from pathlib import Path
from typing import Annotated

import typer

from easerve.cli.bench import options
from easerve.cli.bench.options import asking, judging, telling, timing
from easerve.cli.errors import USAGE_ERROR, fail


def bench_goodput(
    url: options.Url = None,
    model: options.Model = None,
    api_key: options.ApiKey = None,
    modality: options.Modality = "image",
    preset: options.Preset = None,
    dataset: options.Dataset = None,
    shuffle: options.Shuffle = False,
    oversample: options.Oversample = False,
    text_tokens: options.TextTokens = None,
    output_tokens: options.OutputTokens = None,
    num_items: options.NumItems = None,
    image_sizes: options.ImageSizes = None,
    items: options.Items = None,
    keep_eos: options.KeepEos = False,
    rates: Annotated[
        str | None, timing(help="These instead of a search: 1,2,4 requests per second.")
    ] = None,
    start_rate: Annotated[
        float | None, timing(help="Where to begin; default: what one client alone gets.")
    ] = None,
    min_rate: Annotated[float | None, timing(help="Default: a 64th of where it begins.")] = None,
    max_rate: Annotated[float | None, timing(help="Default: 64 times that.")] = None,
    arrival: Annotated[str, timing(help="poisson, gamma or constant.")] = "poisson",
    cv: Annotated[float | None, timing(help="Of gamma: 1 is Poisson, more is burstier.")] = None,
    duration: Annotated[
        float | None,
        timing(help="Seconds of a run; default: 30 to 120, as long as the promises need."),
    ] = None,
    num_requests: Annotated[int, timing(min=1, help="Of a run, at least.")] = 100,
    seeds: Annotated[int, timing(min=1, help="Runs at a rate, unless it is clear before.")] = 3,
    max_runs: Annotated[int, timing(min=1, help="Of the search, in all.")] = 60,
    alone: Annotated[int, timing(min=1, help="Requests alone, before the search.")] = 10,
    slos: options.Slos = None,
    wanted: Annotated[float, judging(help="Share of requests that keep the promise.")] = 0.9,
    tolerance: Annotated[
        float, judging(help="Between the rate that is kept and one that is not.")
    ] = 0.05,
    reference: options.ReferenceFile = None,
    machine: options.Machine = None,
    seed: options.Seed = 0,
    warmup: options.Warmup = None,
    timeout: options.Timeout = 600,
    label: options.Label = None,
    endpoint: options.Endpoint = "chat",
    allow_late: options.AllowLate = False,
    out: options.Out = None,
    html: options.Html = None,
    json_output: options.Json = False,
) -> None:
    """The highest rate at which a server keeps a promise, and the most goodput at any rate.

    Without --slo: all tiers, which need a reference (easerve bench reference).

    At each rate arrivals are the same for every server; pictures and texts never repeat.
    """
    from easerve.cli.bench import asked, command, goodput
    from easerve.cli.bench.goodput_search import Plan
    from easerve.cli.bench.run import Output, Promises
    from easerve.config import ConfigError

    try:
        offered = goodput.Offered(
            asked.server(url, model, api_key, timeout, label, endpoint),
            asked.source(
                *(modality, preset, dataset, text_tokens, output_tokens, num_items, image_sizes),
                *(shuffle, oversample, keep_eos, items),
            ),
            Promises(slos or ("all",), reference, machine),
            arrival,
            cv,
            warmup,
        )
        plan = Plan(
            tuple(command.numbers("rates", rates)) if rates else (),
            start_rate,
            min_rate,
            max_rate,
            tolerance,
            wanted,
            seeds,
            seed,
            max_runs,
            duration,
            num_requests,
            alone,
            allow_late,
        )
        raise typer.Exit(goodput.run(offered, plan, Output(json_output, out, html, allow_late)))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


def bench_reference(
    url: options.Url = None,
    model: options.Model = None,
    api_key: options.ApiKey = None,
    modality: options.Modality = "image",
    preset: options.Preset = None,
    dataset: options.Dataset = None,
    text_tokens: options.TextTokens = None,
    output_tokens: options.OutputTokens = None,
    num_items: options.NumItems = None,
    image_sizes: options.ImageSizes = None,
    items: options.Items = None,
    keep_eos: options.KeepEos = False,
    num_requests: Annotated[int, asking(min=1, help="One at a time.")] = 20,
    machine: Annotated[
        str | None, telling(help="What serves; default: this CPU, for a server on this machine.")
    ] = None,
    seed: options.Seed = 0,
    warmup: options.Warmup = None,
    timeout: options.Timeout = 600,
    label: options.Label = None,
    allow_late: options.AllowLate = False,
    out: Annotated[Path | None, telling(help="Default: where easerve bench looks for it.")] = None,
    force: Annotated[bool, telling("--force", help="Write over the file that is there.")] = False,
) -> None:
    """What requests take that have a server to themselves; tiers are multiples of it.

    Measured once, on one system, and then used for every system that is compared.
    """
    from easerve.cli.bench import asked
    from easerve.cli.bench import reference as command
    from easerve.config import ConfigError

    try:
        plan = command.Plan(
            asked.server(url, model, api_key, timeout, label),
            asked.source(
                *(modality, preset, dataset, text_tokens, output_tokens, num_items, image_sizes),
                keep_eos=keep_eos,
            ),
            machine,
            num_requests,
            warmup,
            seed,
            out,
            force,
            allow_late,
        )
        raise typer.Exit(command.run(plan))
    except ConfigError as error:
        fail(error, USAGE_ERROR)
