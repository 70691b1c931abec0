"""The options of ``easerve bench`` itself, which is what it does without a subcommand."""

from pathlib import Path
from typing import Annotated

import typer

from easerve.cli.bench import options
from easerve.cli.bench.options import asking, timing
from easerve.cli.errors import USAGE_ERROR, fail

HELP = """Load on any OpenAI-compatible server, and what it was worth: goodput, TTFT, TPOT.

easerve bench --url http://127.0.0.1:8000 --rate 5 --slo ttft=2s,tpot=80ms

The subcommands measure other things, most of them side by side on engines that they start."""


def bench_server(
    context: typer.Context,
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
    num_requests: Annotated[
        int | None,
        asking(min=1, help="Default: 100, or all of a trace, of steps, of a data set."),
    ] = None,
    rate: Annotated[str | None, timing(help="Requests per second; inf: all at once.")] = None,
    arrival: Annotated[
        str | None,
        timing(help="poisson, gamma, constant, trace, ramp or steps; default: poisson."),
    ] = None,
    cv: Annotated[float | None, timing(help="Of gamma: 1 is Poisson, more is burstier.")] = (None),
    trace: Annotated[
        Path | None, timing(help="A file of times, seconds from the start, one a line.")
    ] = None,
    end_rate: Annotated[str | None, timing(help="Of a ramp from --rate.")] = None,
    steps: Annotated[
        str | None, timing(help="Rate x seconds: 5x60,20x30.", metavar="RxS,...")
    ] = None,
    concurrency: Annotated[
        int | None, timing(min=1, help="A closed loop: so many are always in flight.")
    ] = None,
    max_in_flight: Annotated[
        int | None,
        timing(min=1, help="With a rate: more have to wait, which counts in their times."),
    ] = None,
    burstiness: Annotated[float | None, timing(hidden=True)] = None,
    max_concurrency: Annotated[int | None, timing(min=1, hidden=True)] = None,
    slos: options.Slos = None,
    reference: options.ReferenceFile = None,
    machine: options.Machine = None,
    seed: options.Seed = 0,
    warmup: options.Warmup = None,
    timeout: options.Timeout = 600,
    label: options.Label = None,
    endpoint: options.Endpoint = "chat",
    stream: options.Stream = True,
    watch: options.Watch = True,
    allow_late: options.AllowLate = False,
    out: options.Out = None,
    html: options.Html = None,
    json_output: options.Json = False,
) -> None:
    if context.invoked_subcommand is not None:
        _check_alone(context)
        return
    from easerve.cli.bench import asked, run
    from easerve.config import ConfigError

    try:
        plan = run.Plan(
            asked.server(url, model, api_key, timeout, label, endpoint, stream),
            asked.source(
                *(modality, preset, dataset, text_tokens, output_tokens, num_items, image_sizes),
                *(shuffle, oversample, keep_eos, items),
            ),
            asked.pace(
                *(rate, arrival, cv, trace, end_rate, steps, concurrency, max_in_flight),
                *(burstiness, max_concurrency),
                has_times=dataset is not None,
            ),
            run.Promises(slos or (), reference, machine),
            seed,
            num_requests,
            warmup,
            watch,
        )
        raise typer.Exit(run.run(plan, run.Output(json_output, out, html, allow_late)))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


def _check_alone(context: typer.Context) -> None:
    """Options in front of a subcommand would do nothing."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            name = max(parameter.opts, key=len)
            fail(
                f"{name} does nothing here: give it after {context.invoked_subcommand}, if it has "
                "such an option",
                USAGE_ERROR,
            )
