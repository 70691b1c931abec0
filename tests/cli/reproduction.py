"""A small folder of scenarios, and a book of made-up runs of it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from easerve.cli.reproduce import fit as fits
from easerve.cli.reproduce.book import Book, keeps_quantiles
from easerve.cli.reproduce.fit import Fit
from easerve.cli.reproduce.page import Page
from easerve.cli.reproduce.plan import FITTED, Point, Study, points, read
from easerve.cli.reproduce.runner import Figures
from easerve.cli.reproduce.verdicts import Results
from easerve.goodput import TIERS

ENGINES: dict[str, dict[str, int]] = {"encode": {}, "prefill": {}, "decode": {}}
SYSTEMS = {
    "title": "Three systems",
    "model": "ultravox-v0.6-27b",
    "hardware": "a100-80",
    "num_gpus": 8,
    "costs": {"source": "roofline"},
    "workload": {"rate_per_s": 2, "num_requests": 12, "preset": "librispeech"},
    "slo": {"ttft_ref_s": 0.5, "tpot_ref_s": 0.05},
    "systems": {"easerve": ENGINES, "vllm": {}, "dynamo": ENGINES},
    "experiment": {
        "systems": ["easerve", "vllm", "dynamo"],
        "rates_per_s": [1, 2],
        "seeds": [1, 2, 3],
        "variants": {"paper": {"systems.easerve.policy.when": "gap"}},
        "topologies": {
            "p2": {"systems.easerve.prefill.replicas": 2, "systems.dynamo.prefill.replicas": 2},
            "2x4": {"systems.vllm": {"replicas": 2, "tensor_parallel_size": 4}},
        },
    },
    "anchors": [
        {
            "system": "easerve",
            "variant": "paper",
            "metric": "goodput_per_s.S3",
            "published": 2.0,
            "source": "abstract",
        },
        {
            "system": "dynamo",
            "metric": "goodput_per_s.S3",
            "published": 0.5,
            "source": "digest",
            "note": "Its queue is not known.",
        },
        {
            "system": "easerve",
            "rate_per_s": 2,
            "metric": "throughput_per_s",
            "over": {"system": "vllm"},
            "published": 2.0,
            "source": "abstract",
        },
    ],
}
VARIANTS = {
    "base": "systems.yaml",
    "title": "Without one rule at a time",
    "experiment": {
        "systems": ["easerve"],
        "rates_per_s": [2],
        "seeds": [1],
        "variants": {
            "greedy": {"systems.easerve.policy.when": "greedy"},
            "eager": {"systems.easerve.policy.when": "greedy"},
            "bursts": {"workload.arrivals": "gamma", "workload.cv": 2},
        },
    },
    "anchors": [],
}
GRID = {
    "base": "systems.yaml",
    "title": "Every configuration",
    "experiment": {
        "systems": ["easerve"],
        "rates_per_s": [2],
        "seeds": [1],
        "grid": [
            {"e1": {}, "e2": {"systems.easerve.encode.replicas": 2}},
            {
                "b1": {"systems.easerve.policy.max_batch_items": 1},
                "b2": {"systems.easerve.policy.max_batch_items": 2},
            },
        ],
    },
    "anchors": [],
}
KNOBS = {
    "scenarios": ["systems"],
    "knobs": {
        "speed": {
            "why": "The clock of the card is not known.",
            "choices": [{}, {"costs.knobs.gemm_scale": 1.5}],
            "chosen": 1,
        }
    },
}


def folder(path: Path) -> Path:
    """Writes the scenarios there."""
    files = {"systems": SYSTEMS, "variants": VARIANTS, "grid": GRID, "fitted": KNOBS}
    for name, content in files.items():
        (path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return path


def studies(path: Path) -> tuple[Fit, list[Study]]:
    fit = fits.read(path / "fitted.yaml")
    return fit, read(path, fit.changes(fit.chosen))


def book(of: Sequence[Study], fit: Fit) -> Book:
    """Runs that nothing has simulated: our system is twice as good as the others, and Dynamo three
    times as good with two prefill engines.
    """
    runs = {point: figures(point) for study in of for point in points(study)}
    by_name = {study.name: study for study in of}
    return Book(
        fit.changes(fit.chosen),
        {study.name: study.digest() for study in of},
        runs,
        {
            point: {"ttft_s": [0.1, 0.5, 2.0], "tpot_s": [0.01, 0.02, 0.05]}
            for point in runs
            if keeps_quantiles(by_name[point.study], point)
        },
    )


def figures(point: Point) -> Figures:
    speed = 1.0 if point.system == "easerve" else 0.5
    speed *= 3.0 if (point.system, point.variant) == ("dynamo", "p2") else 1.0
    speed *= 0.9 if point.knobs == FITTED else 1.0
    speed *= 1 + 0.01 * (point.seed - 1)
    return dict(_figures(point, speed))


def _figures(point: Point, speed: float) -> Iterator[tuple[str, float]]:
    yield "num_requests", 12
    yield "simulated_s", 12 / speed
    yield "throughput_per_s", speed * point.rate_per_s
    for tier in TIERS:
        yield f"goodput_per_s.{tier}", speed * point.rate_per_s
    for part, times in (("p50", 1), ("p99", 3)):
        yield f"ttft_s.{part}", times / speed
        yield f"tpot_s.{part}", 0.02 * times / speed
    for stage in ("encode", "prefill", "decode"):
        yield f"utilisation.{stage}", 0.5 * speed


def page(path: Path) -> Page:
    fit, found = studies(folder(path))
    return Page(found, fit, Results(book(found, fit)))
