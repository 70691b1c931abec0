"""The ``easerve`` command. Exit codes: 0 done, 1 it failed, 2 it was asked wrongly."""

from pathlib import Path
from typing import Annotated, Any

import typer

from easerve import __version__
from easerve.cli.advise_options import advise
from easerve.cli.bench.commands import bench
from easerve.cli.errors import USAGE_ERROR, fail
from easerve.cli.search.options import search

app = typer.Typer(
    name="easerve",
    help="Encode-aware, disaggregated serving of multimodal language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"easerve {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Encode-aware, disaggregated serving of multimodal language models."""


@app.command()
def serve(
    source: Annotated[
        str, typer.Argument(metavar="FILE.yaml | MODEL", help="A deployment file or a model.")
    ],
    topology: Annotated[str | None, typer.Option(help="Engines per stage, e.g. 2e1p1d.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name clients use.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that clients must send.")] = None,
    admin_token: Annotated[
        str | None, typer.Option(help="Opens /admin to those who send it.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="As vLLM's.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="As vLLM's.")] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Of prefill and decode; encoders keep theirs.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a GPU; encoders with local prefill keep theirs.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A file, instead of the model's own template.")
    ] = None,
    tool_call_parser: Annotated[str | None, typer.Option(help="As vLLM's, e.g. hermes.")] = None,
    enable_auto_tool_choice: Annotated[
        bool | None, typer.Option("--enable-auto-tool-choice", help="As vLLM's; tools need it.")
    ] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="As vLLM's, e.g. qwen3.")] = None,
    limit_mm_per_prompt: Annotated[
        str | None, typer.Option(help="Media per request, e.g. '{\"image\": 4}'.")
    ] = None,
    mm_processor_kwargs: Annotated[
        str | None, typer.Option(help="As vLLM's, e.g. '{\"max_pixels\": 1000000}'.")
    ] = None,
    local_prefill: Annotated[
        bool | None,
        typer.Option(help="A prefill engine beside each encoder, on its device."),
    ] = None,
    remote_share: Annotated[
        float | None,
        typer.Option(help="Share of prefills on the prefill engines; the rest: beside encoders."),
    ] = None,
    when: Annotated[
        str | None,
        typer.Option(help="Batching rule: none, greedy, fixed, fill, gap or slack."),
    ] = None,
    partition: Annotated[
        bool | None,
        typer.Option(help="Encode and local prefill divide their device, batch by batch."),
    ] = None,
    how: Annotated[
        str | None, typer.Option(help="Rule that divides it: dynamic, static, none or gate.")
    ] = None,
    decision_log: Annotated[
        Path | None, typer.Option(help="Write every decision there, for easerve replay.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print launch lines and memory plan, start nothing.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")] = False,
) -> None:
    """Serve a model through separate encode, prefill and decode engines.

    Every option can be given as an environment variable, e.g. EASERVE_SERVE_PORT.
    """
    from easerve.cli import serve as command
    from easerve.config import ConfigError

    if json_output and not dry_run:
        fail("--json goes with --dry-run", USAGE_ERROR)
    over: dict[str, Any] = {
        "served_model_name": served_model_name,
        "device": device,
        "server": {"host": host, "port": port, "api_key": api_key, "admin_token": admin_token},
        "policy": {"when": when, "how": how, "remote_share": remote_share},
        "engine": {
            "dtype": dtype,
            "max_model_len": max_model_len,
            "chat_template": chat_template,
            "tool_call_parser": tool_call_parser,
            "enable_auto_tool_choice": enable_auto_tool_choice,
            "reasoning_parser": reasoning_parser,
        },
        "encode": {"gpu_memory_utilization": gpu_memory_utilization},
    }
    for stage in ("prefill", "decode"):
        over[stage] = {
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization,
        }
    try:
        limit = command.json_option("limit-mm-per-prompt", limit_mm_per_prompt)
        over["limits"] = {"limit_mm_per_prompt": limit}
        processor = command.json_option("mm-processor-kwargs", mm_processor_kwargs)
        over["engine"]["mm_processor_kwargs"] = processor
        switches = {"local_prefill": local_prefill, "partition": partition}
        deployment = command.read(source, topology, over, switches)
        if dry_run:
            command.dry_run(deployment, json_output)
        else:
            raise typer.Exit(command.run(deployment, decision_log))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


@app.command()
def demo(
    deployment: Annotated[
        Path | None, typer.Option("--deployment", help="Deployment file; default: the tiny model.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Draw the same picture again; default: a new one.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda: all three engines on the first GPU.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Bring up E, P and D on this machine and ask about a picture drawn just now."""
    from easerve.cli import demo as command
    from easerve.config import ConfigError

    try:
        raise typer.Exit(command.run(deployment, seed, device, json_output))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


@app.command()
def profile(
    deployment: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="A deployment file.")],
    parts: Annotated[
        str,
        typer.Option(
            help="What to measure; of surface and stages, what the file has of the other is kept."
        ),
    ] = "surface,stages,capacity",
    batches: Annotated[str, typer.Option(help="Items of a forward.")] = "1,2,4,8,16",
    units: Annotated[
        str | None, typer.Option(help="Cores or SMs of a forward; default: up to 16 numbers.")
    ] = None,
    runs: Annotated[int, typer.Option(min=20, help="Of each, after 3 warm-ups.")] = 20,
    target_ms: Annotated[
        float | None,
        typer.Option(min=0.01, help="For a forward; default: policy.encode_target_s."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="Of the pictures, e.g. 336x336; default: what the encoder was made for."),
    ] = None,
    num_items: Annotated[
        int, typer.Option(min=0, max=256, help="Part capacity: pictures of a request.")
    ] = 1,
    text_tokens: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Part capacity: of a prompt, beside pictures.")
    ] = 24,
    output_tokens: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Part capacity: of an answer.")
    ] = 32,
    tensor_parallel_sizes: Annotated[
        str | None,
        typer.Option(
            help="Part capacity: of prefill and decode, e.g. 1,2,4, each in turn; default: the "
            "file's."
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Part capacity: measure what has been measured, too.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="The profile goes to a file in it, by device and model.")
    ] = Path("profiles"),
    html: Annotated[Path | None, typer.Option(help="Write a report with charts.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure encode by units and batch, what each stage costs, and does alone, on this device."""
    from easerve.cli import profile as command
    from easerve.cli.bench.command import Output, counts, names
    from easerve.config import ConfigError

    try:
        measured = command.read(deployment)
        target_s = measured.policy.encode_target_s if target_ms is None else target_ms / 1e3
        asked = command.Asked(
            names("parts", parts, command.PARTS),
            counts("batches", batches, command.MAX_BATCH),
            None if units is None else counts("units", units, command.MAX_UNITS),
            runs,
            target_s,
            None if size is None else command.size_of(size),
            out,
            num_items,
            text_tokens,
            output_tokens,
            None
            if tensor_parallel_sizes is None
            else counts("tensor-parallel-sizes", tensor_parallel_sizes, command.MAX_SIZE),
            fresh,
        )
        raise typer.Exit(command.run(measured, asked, Output(json_output, html)))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


@app.command()
def replay(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What serve --decision-log has written.")
    ],
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Let this version's core decide a decision log again. Exit code 1: it decides otherwise."""
    from easerve.cli import replay as command
    from easerve.serve.decisions import DecisionLogError

    try:
        raise typer.Exit(command.run(file, json_output))
    except DecisionLogError as error:
        fail(error, USAGE_ERROR)


@app.command()
def simulate(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO.yaml", help="What is served, on what, how.")
    ],
    system: Annotated[
        str | None,
        typer.Option(help="Systems of the scenario, e.g. easerve,vllm, or all; default: its own."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Offered requests per second, e.g. 1,2,5.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seed", "--seeds", help="Same seed, same load; e.g. 1,2,3.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="A variant of the scenario's experiment.")
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change the scenario, e.g. systems.easerve.policy.when=gap."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace that Perfetto shows; of one run.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with pictures.")] = None,
    decision_log: Annotated[
        Path | None, typer.Option(help="Log what our core decides, for easerve replay; one run.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Run systems over modelled engines in virtual time: no GPU, no model needed."""
    from easerve.cli import simulate as command
    from easerve.cli.bench.command import counts, numbers
    from easerve.config import ConfigError

    try:
        asked = command.Asked(
            scenario,
            system,
            None if rate is None else numbers("rate", rate),
            None if seeds is None else counts("seeds", seeds, command.MAX_SEED, least=0),
            variant,
            over or (),
            trace,
            html,
            decision_log,
            json_output,
        )
        raise typer.Exit(command.run(asked))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Scenarios of the folder; default: all."),
    ] = None,
    scenarios: Annotated[Path, typer.Option(help="The folder of scenarios.")] = Path("scenarios"),
    out: Annotated[Path, typer.Option(help="Where the pages lie.")] = Path("docs"),
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=0, max=1024, help="Processes; 0: one a core.")
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="What anchors need, one seed; writes nothing.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 if the pages are stale; writes nothing.")
    ] = False,
    pages: Annotated[
        bool, typer.Option("--pages", help="Write the pages of what has been run; run nothing.")
    ] = False,
    fit: Annotated[
        bool, typer.Option("--fit", help="Choose the knobs of fitted.yaml anew.")
    ] = False,
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Draw figures as well.")
    ] = True,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Simulate the published experiments and write them up beside what was published."""
    import os

    from easerve.cli.reproduce import command
    from easerve.config import ConfigError

    try:
        asked = command.Asked(
            names or (),
            scenarios,
            out,
            jobs or os.cpu_count() or 1,
            quick,
            check,
            pages,
            fit,
            figures,
            json_output,
        )
        raise typer.Exit(command.execute(asked))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


app.command()(search)
app.command()(advise)
app.add_typer(bench)


@app.command("report")
def report_results(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULT.json...", help="Of bench, bench goodput, simulate, ..."),
    ],
    html: Annotated[
        Path | None, typer.Option(help="Write one page with tables and charts.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write every chart as a picture.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page.")] = None,
) -> None:
    """Draw results beside each other; without --html or --png as tables in the terminal."""
    from easerve.cli import report as command
    from easerve.config import ConfigError

    try:
        raise typer.Exit(command.run(command.Asked(results, html, png, title)))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help="Also say how this model would be served.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda, to serve on; default: a GPU if there is one.")
    ] = None,
    gpu_bench: Annotated[
        bool,
        typer.Option("--gpu-bench", help="Measure how this GPU can be divided; < 4 minutes."),
    ] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="With --gpu-bench: a simulated GPU instead.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="With --gpu-bench: write a report with pictures.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say what this machine can do and what EAServe would use. Exit code 1: it cannot serve."""
    from easerve.cli import doctor as command
    from easerve.cli import gpu_bench as bench
    from easerve.config import ConfigError

    if not gpu_bench and (simulate or html is not None):
        fail("--simulate and --html go with --gpu-bench", USAGE_ERROR)
    if gpu_bench and (model or device):
        fail("--gpu-bench measures the GPU; --model and --device say nothing to it", USAGE_ERROR)
    try:
        if gpu_bench:
            raise typer.Exit(bench.run(json_output, html, simulate))
        raise typer.Exit(command.run(json_output, model, device))
    except ConfigError as error:
        fail(error, USAGE_ERROR)


def main() -> None:
    app(auto_envvar_prefix="EASERVE")


if __name__ == "__main__":
    main()
