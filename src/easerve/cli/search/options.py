"""The options of ``easerve search``. Imported whenever the command runs, so nothing heavy is."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from easerve.cli.bench import options
from easerve.cli.errors import USAGE_ERROR, fail

SPACE, SIMULATED, LIVE, RESULTS = "What may vary", "Simulated", "Live", "Results"
METHOD = "How it is searched"
varying = partial(typer.Option, rich_help_panel=SPACE)
searching = partial(typer.Option, rich_help_panel=METHOD)
simulated = partial(typer.Option, rich_help_panel=SIMULATED)
live = partial(typer.Option, rich_help_panel=LIVE)
telling = partial(typer.Option, rich_help_panel=RESULTS)
COMPARED = 10


def search(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO.yaml | FILE.yaml",
            help="A scenario is simulated; a deployment is tried on this machine's engines.",
        ),
    ],
    slo: Annotated[
        str | None,
        typer.Option(help="S1 to S5, own, or ttft=2s,tpot=80ms; default: S3, or its own."),
    ] = None,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the requests that have to keep it.")
    ] = 0.9,
    rates: Annotated[
        str | None,
        typer.Option(
            "--rate",
            "--rates",
            help="Offered requests/s: one, or a ladder of which the highest that is kept counts "
            "(a scenario; default: a ladder of what its stages can do).",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Of the loads that a trial averages over; default: 1,2,3.")
    ] = None,
    space: Annotated[
        str, varying(help="paper: GPUs, encode batch, remote share; full: rules and slots too.")
    ] = "full",
    knobs: Annotated[
        list[str] | None,
        varying("--knob", help="Other values, or one, e.g. policy.max_batch_items=1,4,16."),
    ] = None,
    candidates: Annotated[
        int, varying(min=1, max=100, help="Allocations that are searched, at most.")
    ] = 3,
    tolerance: Annotated[
        float, varying(min=0, max=1, help="How much less than the best a candidate may do.")
    ] = 0.25,
    max_engines: Annotated[
        int | None, varying(min=3, help="On a CPU; default: two more than it has cores.")
    ] = None,
    gpus: Annotated[
        str | None, varying(help="Those of this machine to use, e.g. 0,1,2,3; default: all.")
    ] = None,
    method: Annotated[
        str, searching(help="has, tpe, random, coordinate or grid (everything).")
    ] = "has",
    trials: Annotated[
        int, searching(min=1, max=1_000_000, help="In all, those of earlier runs included.")
    ] = 30,
    seed: Annotated[int, searching(min=0, help="Same seed, same study.")] = 0,
    storage: Annotated[
        str | None,
        searching(help="Keep the study: it can go on, and optuna-dashboard shows it."),
    ] = None,
    study: Annotated[
        str | None, searching(help="Its name there; default: of source, method and seed.")
    ] = None,
    confirm: Annotated[
        int,
        searching(min=0, max=1000, help="Rounds of the winner beside the source as it is."),
    ] = 3,
    compare: Annotated[
        bool,
        searching("--compare", help="Try everything, then compare methods over ten seeds."),
    ] = False,
    compare_seeds: Annotated[
        int, searching(min=1, max=1000, help="With --compare: studies of each method.")
    ] = COMPARED,
    dry_run: Annotated[
        bool,
        searching("--dry-run", help="Say what would be searched and what is pruned, and end."),
    ] = False,
    over: Annotated[
        list[str] | None,
        simulated("--set", help="Change the scenario, e.g. workload.num_requests=200."),
    ] = None,
    deployment: Annotated[
        Path | None, simulated(help="Deployment file on which the winner is laid.")
    ] = None,
    jobs: Annotated[
        int, simulated("--jobs", "-j", min=0, max=1024, help="Of --compare; 0: one a core.")
    ] = 0,
    modality: Annotated[
        str, live(help="What is asked: image, text, mix or shapes, as of easerve bench.")
    ] = "shapes",
    text_tokens: options.TextTokens = None,
    output_tokens: options.OutputTokens = None,
    num_items: options.NumItems = None,
    image_sizes: options.ImageSizes = None,
    window: Annotated[float, live(min=1, max=86_400, help="Seconds of load of a score.")] = 20,
    reference: options.ReferenceFile = None,
    machine: options.Machine = None,
    profiles: Annotated[
        Path, live(help="Folder with what stages do alone; what lacks is measured.")
    ] = Path("profiles"),
    allow_late: options.AllowLate = False,
    out: Annotated[Path | None, telling(help="Write the winner, for easerve serve.")] = None,
    html: Annotated[Path | None, telling(help="Write a report with charts.")] = None,
    json_output: Annotated[bool, telling("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Find the deployment: prune allocations by what stages do alone, refine the rest by trials.

    Exit code 1: no configuration that was tried keeps the promise.
    """
    import os

    from easerve.cli.bench.asked import source as load_of
    from easerve.cli.bench.command import counts, numbers
    from easerve.cli.search import command, prepare
    from easerve.config import ConfigError

    try:
        rates_per_s = None if rates is None else numbers("rate", rates)
        given_seeds = "1,2,3" if seeds is None else seeds
        common = prepare.Common(
            source,
            slo,
            tuple(counts("seeds", given_seeds, command.MAX_SEED, least=0)),
            attainment,
            space,
            prepare.knobs_of(knobs or ()),
            candidates,
            tolerance,
        )
        tried = None
        is_scenario = prepare.is_scenario(source)
        alien: dict[str, object] = {"set": over, "deployment": deployment}
        if is_scenario:
            alien = {"gpus": gpus, "max-engines": max_engines, "reference": reference}
        for name, given in alien.items():
            if given:
                kind = "deployment file" if is_scenario else "scenario"
                raise ConfigError(f"--{name} goes with a {kind}, which {source} is not")
        if not is_scenario:
            if rates_per_s is None or len(rates_per_s) > 1:
                raise ConfigError("--rate: one is needed, at which engines are tried")
            load = load_of(
                modality,
                text_tokens=text_tokens,
                output_tokens=output_tokens,
                num_items=num_items,
                image_sizes=image_sizes,
            )
            tried = prepare.Live(
                *(load, rates_per_s[0], window, reference, machine),
                max_engines,
                None if gpus is None else counts("gpus", gpus, command.MAX_GPU, least=0),
                profiles,
                allow_late,
            )
        asked = command.Asked(
            common,
            prepare.Simulated(over or (), rates_per_s, deployment),
            tried,
            method,
            trials,
            seed,
            command.storage_of(storage),
            study,
            confirm,
            compare_seeds if compare else 0,
            jobs or os.cpu_count() or 1,
            dry_run,
            out,
            html,
            json_output,
        )
        raise typer.Exit(command.run(asked))
    except ConfigError as error:
        fail(error, USAGE_ERROR)
