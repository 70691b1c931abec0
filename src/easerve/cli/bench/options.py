"""Options of benches that ask a server from outside: how they are spelt.

``asked`` has what they come to. Imported whenever the command runs, so nothing heavy is.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

ALIASES = {
    # vLLM's bench
    "base-url": "url",
    "num-prompts": "num-requests",
    "request-rate": "rate",
    "goodput": "slo",
    "num-warmups": "warmup",
    "output-len": "output-tokens",
    "random-output-len": "output-tokens",
    "random-input-len": "text-tokens",
    "dataset-path": "dataset",
    # aiperf
    "request-count": "num-requests",
    "warmup-request-count": "warmup",
    "random-seed": "seed",
}
"""How other tools call the same."""
API_KEY = "OPENAI_API_KEY"

REQUESTS, ARRIVALS, PROMISES, OUTPUT = "What is asked", "When", "What it is judged by", "Results"
option = partial(typer.Option, show_envvar=False)
asking = partial(option, rich_help_panel=REQUESTS)
timing = partial(option, rich_help_panel=ARRIVALS)
judging = partial(option, rich_help_panel=PROMISES)
telling = partial(option, rich_help_panel=OUTPUT)

Url = Annotated[str | None, option(help="The server, e.g. http://127.0.0.1:8000.")]
Model = Annotated[str | None, option(help="Default: the only one that it has.")]
ApiKey = Annotated[str | None, option(help=f"Default: {API_KEY} of the environment.")]
Endpoint = Annotated[str, option(help="chat or completions.")]
Stream = Annotated[bool, option("--stream/--no-stream", help="Without: no TTFT, no TPOT.")]
Timeout = Annotated[float, option(min=0.001, help="Seconds, for a request as a whole.")]

Modality = Annotated[str, asking(help="image, video, audio, text, mix or shapes.")]
Preset = Annotated[str | None, asking(help="A mix by name, e.g. random-mm.")]
Dataset = Annotated[Path | None, asking(help="Requests of a file, one JSON object a line.")]
Shuffle = Annotated[bool, asking("--shuffle", help="The lines of the data set, by seed.")]
Oversample = Annotated[bool, asking("--oversample", help="Its lines may come again.")]
TextTokens = Annotated[str | None, asking(help="Of a prompt, about: 1024 or 100-2000.")]
OutputTokens = Annotated[str | None, asking(help="Of an answer: 128 or 8-64.")]
NumItems = Annotated[str | None, asking(help="Media of a request: 1 or 1-4.")]
Items = Annotated[
    str | None,
    asking(
        metavar="YAML",
        help="A mix of your own: [{image: 1280x720, weight: 2}, {video: 640x360, frames: 16}, "
        "{audio_s: [2, 16]}, {}]; or vLLM's buckets.",
    ),
]
ImageSizes = Annotated[str | None, asking(help="Each as often: 1280x720,256x256.")]
KeepEos = Annotated[
    bool, asking("--keep-eos", help="Answers may end before their number of tokens.")
]
Seed = Annotated[int, asking(min=0, help="Same seed, same requests and gaps.")]
Warmup = Annotated[int | None, asking(min=0, help="Others before them; default: 8.")]

Slos = Annotated[
    list[str] | None,
    judging("--slo", help="S1 to S5, all, or ttft=2s,tpot=80ms,latency=9s; repeatable."),
]
ReferenceFile = Annotated[Path | None, judging(help="What tiers are multiples of.")]
Machine = Annotated[str | None, judging(help="What serves, if not this CPU: finds the reference.")]
AllowLate = Annotated[
    bool, judging("--allow-late", help="Figures even if the client was too slow.")
]

Label = Annotated[str | None, telling(help="The system's name in reports.")]
Watch = Annotated[bool, telling("--watch/--no-watch", help="The server's metrics over time.")]
Out = Annotated[Path | None, telling(help="Write the JSON, for easerve report.")]
Html = Annotated[Path | None, telling(help="Write a report with charts.")]
Json = Annotated[bool, telling("--json", help="One JSON object on stdout.")]


def normalised(name: str) -> str:
    """An option's name, without dashes, as it is spelt here."""
    return ALIASES.get(name, name)
