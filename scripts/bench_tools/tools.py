"""The tools: their command lines for a case, and their figures, in seconds and under our names."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench_tools.cases import (
    PARTS,
    SLO_TPOT_S,
    SLO_TTFT_S,
    TIMES,
    TOKENS,
    TPOT_S,
    TTFT_S,
    Case,
    Figures,
)

ROOT = Path(__file__).parents[2]
TOKENIZER = "models/tiny-llava"
TIMEOUT_S = 300.0
ITL = "inter_token_latency"  # which is aiperf's word for TPOT
Command = Callable[[Case, str, Path], list[str]]


class ToolError(Exception):
    """A tool has measured nothing; its last words."""


def easerve(case: Case, url: str, folder: Path) -> list[str]:
    if case.concurrency is not None:
        pace = ["--concurrency", str(case.concurrency)]
    else:
        arrival = "poisson" if case.poisson else "constant"
        pace = ["--rate", f"{case.rate_per_s:g}", "--arrival", arrival]
    return [
        *(str(Path(sys.executable).with_name("easerve")), "bench", "--url", url),
        *("--modality", "text", "--text-tokens", "10", "--output-tokens", str(TOKENS)),
        *("--num-requests", str(case.num_requests), "--warmup", "0", *pace),
        *("--slo", f"ttft={SLO_TTFT_S:g}s,tpot={1e3 * SLO_TPOT_S:g}ms"),
        "--allow-late",  # the other two would not notice
        *("--out", str(folder / "easerve.json")),
    ]


def vllm(executable: str) -> Command:
    def command(case: Case, url: str, folder: Path) -> list[str]:
        if case.concurrency is not None:
            pace = ["--max-concurrency", str(case.concurrency)]
        else:
            burstiness = "1" if case.poisson else "inf"
            pace = ["--request-rate", f"{case.rate_per_s:g}", "--burstiness", burstiness]
        return [
            *(executable, "bench", "serve", "--backend", "openai-chat", "--base-url", url),
            *("--endpoint", "/v1/chat/completions", "--model", "scripted"),
            *("--tokenizer", TOKENIZER, "--dataset-name", "random", "--random-input-len", "10"),
            *("--random-output-len", str(TOKENS), "--num-prompts", str(case.num_requests)),
            *("--ready-check-timeout-sec", "0", "--seed", "0", "--disable-tqdm", *pace),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"),
            *("--goodput", f"ttft:{1e3 * SLO_TTFT_S:g}", f"tpot:{1e3 * SLO_TPOT_S:g}"),
            *("--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"),
        ]

    return command


def aiperf(executable: str) -> Command:
    def command(case: Case, url: str, folder: Path) -> list[str]:
        if case.concurrency is not None:
            pace = ["--concurrency", str(case.concurrency)]
        else:
            pattern = "poisson" if case.poisson else "constant"
            pace = ["--request-rate", f"{case.rate_per_s:g}", "--arrival-pattern", pattern]
        return [
            *(executable, "profile", "--model", "scripted", "--url", url),
            *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
            *("--tokenizer", TOKENIZER, "--isl", "10", "--osl", str(TOKENS), "--random-seed", "0"),
            *("--request-count", str(case.num_requests), *pace, "--ui", "none"),
            *("--goodput", f"time_to_first_token:{1e3 * SLO_TTFT_S:g} {ITL}:{1e3 * SLO_TPOT_S:g}"),
            *("--artifact-dir", str(folder)),
        ]

    return command


def of_easerve(result: Mapping[str, Any]) -> Figures:
    ended = ("failed", "rejected", "timed_out", "cancelled")
    return {
        **{f"{name}.{part}": result[name][part] for name in TIMES for part in PARTS},
        "throughput_per_s": result["throughput_per_s"],
        "output_tokens_per_s": result["output_tokens_per_s"],
        "goodput_per_s": next(iter(result["goodput_per_s"].values())),
        "completed": result["completed"],
        "failed": sum(result[name] for name in ended),
    }


def of_vllm(result: Mapping[str, Any]) -> Figures:
    names = dict(zip(TIMES, ("ttft", "tpot", "itl", "e2el"), strict=True))
    return {
        **{
            f"{name}.{part}": result[f"{part}_{names[name]}_ms"] / 1e3
            for name in TIMES
            for part in PARTS
        },
        "throughput_per_s": result["request_throughput"],
        "output_tokens_per_s": result["output_throughput"],
        "goodput_per_s": result["request_goodput"],
        "completed": result["completed"],
        "failed": result["failed"],
    }


AIPERF_TIMES = {
    "ttft_s": "time_to_first_token",
    "tpot_s": ITL,
    "itl_s": "inter_chunk_latency",
    "latency_s": "request_latency",
}


def of_aiperf(result: Mapping[str, Any]) -> Figures:
    """What nothing happened of, it leaves out."""

    def found(name: str, part: str = "avg") -> float | None:
        entry = result.get(name)
        return None if entry is None else float(entry[part])

    times: Figures = {}
    for name, theirs in AIPERF_TIMES.items():
        for part in PARTS:
            value = found(theirs, "avg" if part == "mean" else part)
            times[f"{name}.{part}"] = None if value is None else value / 1e3
    return {
        **times,
        "throughput_per_s": found("request_throughput"),
        "output_tokens_per_s": found("output_token_throughput"),
        "goodput_per_s": found("goodput"),
        "completed": found("request_count") or 0,
        "failed": found("error_request_count") or 0,
    }


@contextmanager
def server(case: Case) -> Iterator[str]:
    """The address of a server that begins its script."""
    delay_s = -1 if case.role_delay_s is None else case.role_delay_s
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.bench.scripted", "--script", case.steps),
            *("--ttft", f"{TTFT_S:g}", "--tpot", f"{TPOT_S:g}", "--tokens", str(TOKENS)),
            *("--role-delay", f"{delay_s:g}"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@dataclass(frozen=True, slots=True)
class Tool:
    """``output``: the file that its command writes into the folder."""

    name: str
    command: Command
    output: str
    figures: Callable[[Mapping[str, Any]], Figures]

    def run(self, case: Case) -> Figures:
        with tempfile.TemporaryDirectory() as folder, server(case) as url:
            command = self.command(case, url, Path(folder))
            ended = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            path = Path(folder) / self.output
            if not path.exists():
                words = (ended.stdout + ended.stderr)[-2000:]
                raise ToolError(f"{self.name} ended with {ended.returncode}, no result: {words}")
            return self.figures(json.loads(path.read_text()))


def tools(vllm_at: str, aiperf_at: str) -> tuple[Tool, ...]:
    return (
        Tool("EAServe", easerve, "easerve.json", of_easerve),
        Tool("vLLM", vllm(vllm_at), "vllm.json", of_vllm),
        Tool("aiperf", aiperf(aiperf_at), "profile_export_aiperf.json", of_aiperf),
    )
