"""``easerve bench``: the options of its subcommands."""

from pathlib import Path
from typing import Annotated, Any

import typer

from easerve.cli.bench import options
from easerve.cli.bench.goodput_options import bench_goodput, bench_reference
from easerve.cli.bench.run_options import HELP, bench_server
from easerve.cli.errors import USAGE_ERROR, fail

bench = typer.Typer(
    name="bench",
    help=HELP,
    callback=bench_server,
    invoke_without_command=True,
    no_args_is_help=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": options.normalised,
    },
)


bench.command("goodput")(bench_goodput)
bench.command("reference")(bench_reference)


@bench.command("encode")
def bench_encode(
    deployment: Annotated[
        Path | None, typer.Argument(metavar="[FILE.yaml]", help="Default: the tiny model.")
    ] = None,
    parts: Annotated[
        str, typer.Option(help="What to measure, of stage,call,server,low,rates,windows.")
    ] = "stage,call,server,low,rates,windows",
    rules: Annotated[
        str, typer.Option(help="Rules to sweep.")
    ] = "none,greedy,fixed,fill,gap,slack",
    rates: Annotated[str, typer.Option(help="Offered requests per second.")] = "5,15,40",
    windows_ms: Annotated[str, typer.Option(help="Fixed windows.")] = "0,20,50,100,200,500,1000",
    low_rate: Annotated[float, typer.Option(min=0.1, help="Requests/s of part low.")] = 5,
    window_rate: Annotated[float, typer.Option(min=0.1, help="Requests/s of part windows.")] = 15,
    duration_s: Annotated[float, typer.Option(min=0.1, help="Of a run at some rate.")] = 5,
    pictures: Annotated[int, typer.Option(min=1, help="Of a run of part stage.")] = 960,
    requests: Annotated[int, typer.Option(min=1, help="Of a run of part server.")] = 240,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients of part server.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of what is compared one to one.")] = 5,
    seed: Annotated[int, typer.Option(help="Same seed, same pictures and gaps.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Write a report with pictures.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Batching rules side by side: the encode stage alone, one call, the whole server, sweeps."""
    from easerve.cli.bench import command
    from easerve.cli.bench.encode import PARTS, Plan
    from easerve.config import ConfigError
    from easerve.policy.batching import RULES

    try:
        measured = command.read(deployment)
        plan = Plan(
            measured.policy,
            command.names("parts", parts, PARTS),
            command.names("rules", rules, RULES),
            command.numbers("rates", rates),
            [each / 1e3 for each in command.numbers("windows-ms", windows_ms, 0, 1000)],
            low_rate,
            window_rate,
            duration_s,
            pictures,
            requests,
            concurrency,
            rounds,
            seed,
        )
        output = command.Output(json_output, html)
        raise typer.Exit(command.bench_encode(measured, plan, output))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


@bench.command("flow")
def bench_flow(
    deployment: Annotated[
        Path | None, typer.Argument(metavar="[FILE.yaml]", help="Default: the tiny model.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of a run.")] = 150,
    rate: Annotated[float, typer.Option(min=0.1, help="Offered requests per second.")] = 80,
    tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 128,
    slots: Annotated[
        int, typer.Option(min=1, help="max_num_seqs of prefill and decode: room for a flood.")
    ] = 128,
    promise: Annotated[
        float, typer.Option(min=1, help="TPOT, as a multiple of that of one request alone.")
    ] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="How often the systems take turns.")] = 3,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Write a report.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """What a fast Encode does to decode, and what credits do about it."""
    from easerve.cli.bench import command
    from easerve.cli.bench.flow import Plan
    from easerve.config import ConfigError

    try:
        room: dict[str, Any] = {"max_num_seqs": slots}
        if deployment is None:  # the tiny model's file has room for few
            room["kv_cache_memory"] = "512MiB"
        measured = command.read(deployment, {"prefill": room, "decode": room})
        plan = Plan(measured.policy, requests, rate, tokens, promise, rounds, seed)
        raise typer.Exit(command.bench_flow(measured, plan, command.Output(json_output, html)))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


@bench.command("transfer")
def bench_transfer(
    deployment: Annotated[
        Path | None, typer.Argument(metavar="[FILE.yaml]", help="Default: the tiny model.")
    ] = None,
    parts: Annotated[str, typer.Option(help="What to measure, of data,engines.")] = "data,engines",
    items: Annotated[str, typer.Option(help="Pictures at once.")] = "1,4,16",
    rounds: Annotated[int, typer.Option(min=1, help="How often the systems take turns.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same pictures.")] = 0,
    disk: Annotated[
        Path | None, typer.Option(help="A folder on a disk, for vLLM's example connector.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with pictures.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """How embeddings get to prefill: pushed, or by the files of vLLM's example connector."""
    from easerve.cli.bench import command
    from easerve.cli.bench.transfer import MAX_ITEMS, OVER, PARTS, Plan
    from easerve.config import ConfigError

    try:
        if command.read(deployment).device != "cpu":
            raise ConfigError("bench transfer measures on a CPU; the deployment has device: cuda")
        measured = command.read(deployment, OVER)
        plan = Plan(
            command.names("parts", parts, PARTS),
            command.counts("items", items, MAX_ITEMS),
            rounds,
            seed,
        )
        output = command.Output(json_output, html)
        raise typer.Exit(command.bench_transfer(measured, plan, disk, output))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


@bench.command("twin")
def bench_twin(
    deployment: Annotated[
        Path | None, typer.Argument(metavar="[FILE.yaml]", help="Default: the tiny model.")
    ] = None,
    rates: Annotated[str, typer.Option(help="Requests per second.")] = "2,5,10,20",
    requests: Annotated[int, typer.Option(min=1, help="Of a round at a rate.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Of each rate, with other arrivals.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same requests.")] = 0,
    profile: Annotated[
        Path | None,
        typer.Option(help="Costs as easerve profile has written them; default: measured first."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """The simulator beside reality: the same requests served, and simulated from a profile."""
    from easerve.cli.bench import command
    from easerve.cli.bench.twin import Plan, run
    from easerve.config import ConfigError

    try:
        measured = command.read(deployment)
        plan = Plan(command.numbers("rates", rates), requests, rounds, seed, profile)
        raise typer.Exit(run(measured, plan, command.Output(json_output, html)))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


@bench.command("partition")
def bench_partition(
    deployment: Annotated[
        Path | None, typer.Argument(metavar="[FILE.yaml]", help="Default: the tiny model.")
    ] = None,
    parts: Annotated[str, typer.Option(help="What to measure, of cell,engines.")] = "cell,engines",
    rules: Annotated[str, typer.Option(help="Rules to compare.")] = "none,static,dynamic,gate",
    duration_s: Annotated[float, typer.Option(min=0.1, help="Of a run with one rule.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="How often the rules take turns.")] = 5,
    load: Annotated[
        float, typer.Option(min=0.01, max=0.95, help="Of the encoder, by its latency alone.")
    ] = 0.4,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same arrivals.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Write a report with pictures.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Encode beside local prefill on one device, by the rules that divide it."""
    from easerve.cli import divide
    from easerve.cli import profile as profiles
    from easerve.cli.bench import command
    from easerve.cli.bench.partition import PARTS, Plan
    from easerve.cli.demo import DEFAULT_DEPLOYMENT
    from easerve.config import ConfigError
    from easerve.policy.partition import RULES, Devices
    from easerve.serve.admin import knobs_of

    try:
        measured = profiles.read(deployment or DEFAULT_DEPLOYMENT, keep_profile=True)
        plan = Plan(
            command.names("rules", rules, RULES),
            knobs_of(measured.policy),
            divide.devices(measured) or Devices(),
            duration_s,
            rounds,
            load,
            seed,
        )
        asked = command.names("parts", parts, PARTS)
        output = command.Output(json_output, html)
        raise typer.Exit(command.bench_partition(measured, asked, plan, output))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


@bench.command("cpu")
def bench_cpu(
    deployment: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE.yaml]", help="Default: examples/tiny-llava-bench.yaml."),
    ] = None,
    mixes: Annotated[
        str, typer.Option(help="Pictures x tokens of an answer.")
    ] = "1x8,1x64,4x8,4x64,8x8,8x64",
    rounds: Annotated[int, typer.Option(min=1, help="How often the systems take turns.")] = 3,
    clients: Annotated[int, typer.Option(min=1, help="Each with a request open, always.")] = 32,
    run_s: Annotated[float, typer.Option(min=0.1, help="Of a run with passthrough, about.")] = 3.5,
    shares: Annotated[
        str, typer.Option(help="Remote shares to try; the best is taken.")
    ] = "0.25,0.5,0.75",
    slo_s: Annotated[float, typer.Option(min=0.1, help="Of a run at some rate.")] = 6,
    timeline_s: Annotated[float, typer.Option(min=0.1, help="Of the run that is drawn.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same requests.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="One small mix, fewer engines: to see that it works.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a report with pictures.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result there, as JSON.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Plain vLLM, a passthrough proxy and each mechanism of EAServe, on the same cores."""
    from easerve.cli.bench import command, cpu_start
    from easerve.config import ConfigError

    try:
        measured = cpu_start.read(deployment)
        plan = cpu_start.plan(
            mixes, rounds, clients, run_s, command.numbers("shares", shares, 0, 1), slo_s,
            timeline_s, seed, quick,
        )  # fmt: skip
        output = command.Output(json_output, html)
        raise typer.Exit(cpu_start.run(measured, plan, quick, output, out))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


@bench.command("simulate")
def bench_simulate(
    scenario: Annotated[
        Path | None,
        typer.Argument(metavar="[SCENARIO.yaml]", help="Default: LLaVA on 8 RTX 6000 Ada."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of the long run.")] = 10_000,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is run.")] = 3,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """How fast the simulator is: times real time, and seconds for many requests."""
    from easerve.cli.bench import simulate as command
    from easerve.config import ConfigError

    try:
        raise typer.Exit(command.run(scenario, requests, rounds, json_output))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


@bench.command("control")
def bench_control(
    rates: Annotated[str, typer.Option(help="Offered requests per second.")] = "50,200,1000",
    modality: Annotated[str, typer.Option(help="Of text,image.")] = "text,image",
    duration_s: Annotated[float, typer.Option(min=0.1, help="Of a run at some rate.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="Of a run at saturation.")] = 3000,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients at saturation.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="How often the systems take turns.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same requests and gaps.")] = 0,
    router: Annotated[
        str | None, typer.Option(help="vLLM's router to compare with; default: on the path.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """What the control plane adds: over engines of fixed latency, beside vLLM's Rust router."""
    from easerve.cli.bench import command, control
    from easerve.cli.bench.control_systems import find_router
    from easerve.config import ConfigError

    try:
        plan = control.Plan(
            command.numbers("rates", rates, most=1e4),
            command.names("modality", modality, control.MODALITIES),
            duration_s,
            tokens,
            requests,
            concurrency,
            rounds,
            seed,
            find_router(router),
        )
        raise typer.Exit(control.run(plan, command.Output(json_output, html)))
    except ConfigError as error:
        fail(error, USAGE_ERROR)
