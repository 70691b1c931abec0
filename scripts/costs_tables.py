"""docs/costs-tables.md: what interpolation misses, and what the stages of large models take.

Run as ``python -m scripts.costs_tables > docs/costs-tables.md``; some seconds.
"""

from collections.abc import Iterable, Sequence
from typing import get_args

from easerve.costs import hardware, models, tokens
from easerve.costs.base import Costs, Forward, Media
from easerve.costs.build import Source, costs
from easerve.costs.held_out import held_out
from easerve.costs.layers import LayerCosts
from easerve.costs.memory import kv_tokens
from easerve.costs.parts import Parts
from easerve.types import Content, Picture, Sound, Video

TEXT_TOKENS, ANSWER_TOKENS = 1024, 128
ITEMS: dict[str, Content] = {
    "llava-v1.6-34b": Picture(1280, 720),
    "qwen2.5-vl-32b": Video(640, 480, 16),
    "ultravox-v0.6-27b": Sound(10),
}
DEVICES = (
    ("rtx6000-ada", 2),
    ("rtx6000-ada", 4),
    ("l40s", 2),
    ("a100-80", 1),
    ("a100-80", 2),
    ("h100-sxm", 2),
)
TABLES = ("l40s", "a100-80", "h100-sxm", "h200-sxm")
BATCHES = (1, 16, 64)
SHARES = (1.0, 0.75, 0.5, 0.25)
HEAD = """\
# Tables of costs

Written by `python -m scripts.costs_tables`; [costs.md](costs.md) says what they mean. Every figure
is untuned: all knobs have their defaults.
"""


def page() -> str:
    return "\n".join([HEAD, *_held_out(), *_stages(), *_parts(), *_shares(), *_memory()])


def _held_out() -> Iterable[str]:
    yield "## Points that are left out and found again\n"
    yield "Relative errors: median, 95th percentile, mean with sign.\n"
    found = {name: held_out(hardware.read(name)) for name in TABLES}
    yield from _head(["kernel", "left out", *TABLES])
    for error in found[TABLES[0]]:
        cells = [error.kernel, error.left_out]
        for name in TABLES:
            same = [x for x in found[name] if (x.kernel, x.left_out) == (cells[0], cells[1])]
            cells.append(
                f"{same[0].median:.1%}, {same[0].p95:.0%}, {same[0].bias:+.1%}" if same else "–"
            )
        yield _row(cells)
    yield ""


def _stages() -> Iterable[str]:
    yield "## What the stages take: measured · roofline\n"
    yield (
        f"Milliseconds. Prefill of a prompt with {TEXT_TOKENS} tokens of text and one item (a "
        "picture of 1280x720, 16 frames of 640x480, 10 s of sound); a decode step of so many such "
        f"sequences, {ANSWER_TOKENS // 2} tokens on; encode of one item and of eight; transfer of "
        "the item's embeddings and of the prompt's KV cache.\n"
    )
    steps = [f"decode {batch}" for batch in BATCHES]
    titles = ["model", "device", "TP", "tokens", "prefill", *steps, "encode 1", "encode 8"]
    yield from _head([*titles, "embeddings", "KV cache"])
    for name in ITEMS:
        for device, tp in DEVICES:
            item, prompt = _request(name)
            ways = [_costs(name, device, tp, source) for source in get_args(Source)]
            times = zip(*(_times(way, item, prompt) for way in ways), strict=True)
            both = [f"{1000 * x:.0f} · {1000 * y:.0f}" for x, y in times]
            sent = (ways[0].embedding_transfer(item.num_tokens), ways[0].kv_transfer(prompt))
            cells = [name, device, str(tp), str(prompt), *both]
            yield _row([*cells, *(f"{1000 * x:.1f}" for x in sent)])
    yield ""


def _parts() -> Iterable[str]:
    yield "## What a step is spent on\n"
    yield "Milliseconds, measured kernels; llava-v1.6-34b. Decode: of 16 sequences.\n"
    item, prompt = _request("llava-v1.6-34b")
    context = 16 * (prompt + ANSWER_TOKENS // 2)
    steps = {
        "prefill": Forward(prompt, prompt * (prompt + 1) // 2, 1),
        "decode": Forward(num_decodes=16, decode_context=context),
    }
    names = (name.replace("_", "-") for name in Parts._fields)
    yield from _head(["step", "device", "TP", *names, "all"])
    for step, forward in steps.items():
        for device, tp in DEVICES:
            parts = _costs("llava-v1.6-34b", device, tp, "measured").parts(forward)
            numbers = (f"{1000 * part:.1f}" for part in (*parts, sum(parts)))
            yield _row([step, device, str(tp), *numbers])
    for device in ("rtx6000-ada", "a100-80"):
        parts = _costs("llava-v1.6-34b", device, 2, "measured").encode_parts([item])
        numbers = (f"{1000 * part:.1f}" for part in (*parts, sum(parts)))
        yield _row(["encode", device, "1", *numbers])
    yield ""


def _shares() -> Iterable[str]:
    yield "## On a share of the units\n"
    yield "Milliseconds on an RTX 6000 Ada, measured kernels; TP 2, and 1 for encode.\n"
    yield from _head(["model", "stage", *(f"{share:.0%}" for share in SHARES)])
    for name in ITEMS:
        item, prompt = _request(name)
        found = _costs(name, "rtx6000-ada", 2, "measured")
        context = 16 * (prompt + ANSWER_TOKENS // 2)
        for stage, times in (
            ("prefill", [found.prefill(prompt, share) for share in SHARES]),
            ("decode 16", [found.decode_step(16, context, share) for share in SHARES]),
            ("encode 1", [found.encode([item], share) for share in SHARES]),
        ):
            yield _row([name, stage, *(f"{1000 * time:.0f}" for time in times)])
    yield ""


def _memory() -> Iterable[str]:
    yield "## Tokens in the KV cache of an engine\n"
    yield (
        "90 % of the memory, less weights and 1.5 GiB of each device for activations; beside an "
        "encoder in brackets.\n"
    )
    yield from _head(["model", *(f"{device}, TP {tp}" for device, tp in DEVICES)])
    for name in ITEMS:
        model = models.read(name)
        cells = [name]
        for device, tp in DEVICES:
            kind, encoder = hardware.read(device), model.encoder.weight_bytes
            alone = kv_tokens(model.language, kind, tp)
            beside = kv_tokens(model.language, kind, tp, other_bytes=encoder)
            cells.append(f"{alone:,} ({beside:,})")
        yield _row(cells)


def _costs(name: str, device: str, tp: int, source: Source) -> LayerCosts:
    return costs(models.read(name), hardware.read(device), tp, source)


def _request(name: str) -> tuple[Media, int]:
    """The item of a model's requests, and tokens of the prompt."""
    item = tokens.media(models.read(name), ITEMS[name])
    return item, TEXT_TOKENS + item.num_tokens


def _times(way: Costs, item: Media, prompt: int) -> list[float]:
    context = prompt + ANSWER_TOKENS // 2
    decodes = [way.decode_step(batch, batch * context) for batch in BATCHES]
    return [way.prefill(prompt), *decodes, way.encode([item]), way.encode([item] * 8)]


def _head(titles: Sequence[str]) -> Iterable[str]:
    yield _row(titles)
    yield _row(["---"] * len(titles))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page())
