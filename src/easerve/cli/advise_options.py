"""The options of ``easerve advise``. Imported whenever the command runs, so nothing heavy is."""

from pathlib import Path
from typing import Annotated

import typer

from easerve.cli.errors import USAGE_ERROR, fail


def advise(
    file: Annotated[
        Path,
        typer.Argument(metavar="SCENARIO.yaml | FILE.yaml", help="A scenario or a deployment."),
    ],
    slo: Annotated[
        str | None, typer.Option(help="A tier, or e.g. ttft=2s,tpot=80ms; default: S3, or its own.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Offered requests per second, e.g. 1,2,5; default: found.")
    ] = None,
    seeds: Annotated[str, typer.Option("--seed", "--seeds", help="Of the loads.")] = "1,2",
    variant: Annotated[
        str | None, typer.Option(help="A variant of the scenario's experiment.")
    ] = None,
    over: Annotated[
        list[str] | None, typer.Option("--set", help="Change the scenario, e.g. num_gpus=4.")
    ] = None,
    chunks: Annotated[
        str,
        typer.Option(
            help="Tokens of a step that aggregated engines may choose from; none: theirs."
        ),
    ] = "256,512,1024",
    max_requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Of a run.")] = 1000,
    model: Annotated[
        str | None, typer.Option(help="Of a deployment file: a model of costs, or a YAML file.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Of a deployment file: a device of costs, or a YAML file.")
    ] = None,
    profile_path: Annotated[
        Path | None,
        typer.Option("--profile", help="Of a deployment file: what easerve profile wrote."),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Of a deployment file: what requests ask, e.g. random-mm.")
    ] = None,
    num_gpus: Annotated[
        int | None, typer.Option(min=1, help="Of a deployment file; default: as many as it uses.")
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=0, max=1024, help="Processes; 0: one a core.")
    ] = 0,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say whether to split encode, prefill and decode on the same GPUs, or better not."""
    import os

    from easerve.cli import advise as command
    from easerve.cli.advise_deployment import Given
    from easerve.cli.bench.command import counts, numbers
    from easerve.config import ConfigError

    try:
        asked = command.Asked(
            file,
            None if rate is None else numbers("rate", rate),
            counts("seeds", seeds, 1 << 53, least=0),
            slo,
            variant,
            over or (),
            () if chunks == "none" else counts("chunks", chunks, 1 << 20),
            max_requests,
            jobs or os.cpu_count() or 1,
            html,
            json_output,
            Given(model, hardware, profile_path, preset, num_gpus),
        )
        raise typer.Exit(command.run(asked))
    except ConfigError as error:
        fail(error, USAGE_ERROR)
