"""Write the tables of src/easerve/costs/kernels from NVIDIA's package of measured kernels.

Run as ``python -m scripts.kernel_tables OUT`` with ``pip install easerve[kernels]``. The same
package gives the same bytes. Kept are the kernels that our models need, in bfloat16: matrix
products with at least 256 rows and columns of weights; attention with heads of 64 and 128 values
over all tokens; the encoders' attention; all-reduce. Times are written in microseconds, to four
digits.

At the end it says how far the costs of attention within a window, which are found from attention
over all tokens, are from the windows that the package has: of 1024 tokens, heads of 256 values.
"""

import gzip
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

from easerve.costs.kernels import Plane, causal_pairs

PACKAGE = "aiconfigurator-core"
SMALLEST = 256
HEAD_DIMS = (64, 128)
WINDOW, WINDOW_HEAD_DIM = 1024, 256
LICENCE = "Apache-2.0, (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES"
Key = tuple[int | str, ...]
Rows = Mapping[Key, Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class System:
    """Which versions of a device's tables are taken; None: there is no such table."""

    name: str
    vllm: str
    encoder: str | None
    custom: str
    nccl: str


SYSTEMS = (
    System("l40s", "0.24.0", "0.24.0", "0.22.0", "2.27.3"),
    System("a100_sxm", "0.14.0", None, "0.14.0", "2.27.3"),
    System("h100_sxm", "0.24.0", "0.24.0", "0.24.0", "2.29.2"),
    System("h200_sxm", "0.24.0", "0.24.0", "0.24.0", "2.29.2"),
)


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of a file of the package, and where they are from."""

    path: str
    frame: Any  # of pandas

    @property
    def origin(self) -> str:
        first = self.frame.iloc[0]
        return f"{self.path}; {first['framework']} {first['version']}; {first['device']}"


def main(out: Path) -> None:
    import aiconfigurator_core

    root = Path(str(aiconfigurator_core.__file__)).parent / "systems" / "data"
    out.mkdir(parents=True, exist_ok=True)
    for system in SYSTEMS:
        name = system.name.removesuffix("_sxm")
        for kind, content in tables(root, system).items():
            path = out / f"{name}-{kind}.csv.gz"
            path.write_bytes(gzip.compress(content.encode(), mtime=0))
            print(path, path.stat().st_size)
        if system.encoder is not None:
            print(f"{name}: {windows(root, system)}")


def tables(root: Path, system: System) -> dict[str, str]:
    """Content of each table of a device, by the kind of kernel."""

    def read(family: str, framework: str, release: str, file: str) -> Source:
        import pandas

        path = f"{system.name}/{family}/{framework}/{release}/{file}_perf.parquet"
        return Source(path, pandas.read_parquet(root / path))

    made = {
        "gemm": _gemm(read("gemm", "vllm", system.vllm, "gemm")),
        "context": _context(read("attention", "vllm", system.vllm, "context_attention")),
        "generation": _generation(read("attention", "vllm", system.vllm, "generation_attention")),
        "allreduce": _allreduce(
            read("comm", "vllm", system.custom, "custom_allreduce"),
            read("comm", "nccl", system.nccl, "nccl"),
        ),
    }
    if system.encoder is not None:
        source = read("encoder_attention", "vllm", system.encoder, "encoder_attention")
        made["encoder"] = _encoder(source)
    return made


def windows(root: Path, system: System) -> str:
    """Errors of attention within a window, for prompts that are longer than it."""
    import pandas

    path = f"{system.name}/attention/vllm/{system.vllm}/context_attention_perf.parquet"
    frame = pandas.read_parquet(root / path)
    frame = frame[(frame.kv_cache_dtype == "bfloat16") & (frame.head_dim == WINDOW_HEAD_DIM)]
    frame = frame.assign(
        ratio=frame.num_heads // frame.num_key_value_heads,
        heads=frame.num_heads * frame.batch_size,
    )
    errors = []
    for ratio, rows in frame[frame.window_size == WINDOW].groupby("ratio"):
        whole = frame[(frame.window_size == 0) & (frame.ratio == ratio)]
        points: dict[int, dict[int, float]] = {}
        for (length, heads), latency in whole.groupby(["isl", "heads"]).latency.median().items():
            points.setdefault(length, {})[heads] = latency
        plane = Plane(points, causal_pairs)
        for row in rows[rows.isl > WINDOW].itertuples():
            kept = 2 * WINDOW * (1 - (WINDOW - 1) / (2 * row.isl)) - 1
            errors.append(plane(row.heads * row.isl / kept, kept) / row.latency - 1)
    middle, mean = median(map(abs, errors)), fmean(errors)
    return f"windows: {len(errors)} points, median error {middle:.1%}, mean {mean:+.1%}"


def _gemm(source: Source) -> str:
    frame = source.frame
    large = (frame.n >= SMALLEST) & (frame.k >= SMALLEST)
    rows = _rows(frame[(frame.gemm_dtype == "bfloat16") & large], ("n", "k"), "m")
    return _text("m x k by k x n", [source], ("n", "k"), "m", rows)


def _context(source: Source) -> str:
    """Of prompts from their first token on, each token attending to all before it."""
    keys = ("head_dim", "num_heads", "num_key_value_heads", "batch_size")
    rows = _rows(_attention(source.frame), keys, "isl")
    names = ("head_dim", "heads", "kv_heads", "batch")
    return _text("causal attention of whole prompts", [source], names, "length", rows)


def _generation(source: Source) -> str:
    """Of one token for each sequence, which attends to ``step`` before it and to itself."""
    keys = ("head_dim", "num_heads", "num_key_value_heads", "batch_size")
    frame = _attention(source.frame)
    rows = _rows(frame.assign(context=frame.step + frame.isl), keys, "context")
    names = ("head_dim", "heads", "kv_heads", "batch")
    return _text("attention of one token per sequence", [source], names, "context", rows)


def _encoder(source: Source) -> str:
    rows = _rows(source.frame, ("head_dim", "num_heads", "batch_size"), "isl")
    names = ("head_dim", "heads", "batch")
    return _text("attention without a mask", [source], names, "length", rows)


def _allreduce(custom: Source, nccl: Source) -> str:
    """The package counts elements of two bytes; here it is bytes."""
    frame = custom.frame
    frame = frame[frame.allreduce_dtype == "bfloat16"]
    named = frame.assign(way=frame.backend.str.replace("vllm_", "custom-"))
    other = nccl.frame
    other = other[(other.op_name == "all_reduce") & (other.nccl_dtype == "half")].assign(way="nccl")
    rows: dict[Key, Mapping[int, float]] = {}
    for part in (named, other):
        sized = part.assign(num_bytes=2 * part.message_size)
        rows |= _rows(sized, ("way", "num_gpus"), "num_bytes")
    return _text("all-reduce", [custom, nccl], ("way", "gpus"), "bytes", rows)


def _attention(frame: Any) -> Any:
    if "window_size" in frame:
        frame = frame[frame.window_size == 0]
    return frame[(frame.kv_cache_dtype == "bfloat16") & frame.head_dim.isin(HEAD_DIMS)]


def _rows(frame: Any, keys: Sequence[str], grid: str) -> dict[Key, Mapping[int, float]]:
    """Microseconds by key and by grid; the package has milliseconds."""
    rows: dict[Key, dict[int, float]] = {}
    columns = [*keys, grid, "latency"]
    for *key, at, latency in frame[columns].itertuples(index=False):
        plain = tuple(part if isinstance(part, str) else int(part) for part in key)
        rows.setdefault(plain, {})[int(at)] = 1000 * float(latency)
    return dict(rows)


def _text(what: str, sources: Sequence[Source], keys: Sequence[str], grid: str, rows: Rows) -> str:
    points = sorted({at for row in rows.values() for at in row})
    head = [
        f"# {what}",
        f"# package: {PACKAGE} {version(PACKAGE)}",
        *(f"# source: {source.origin}" for source in sources),
        f"# licence: {LICENCE}",
        f"# keys: {','.join(keys)}",
        f"# columns: {grid}; microseconds",
    ]
    lines = [_line([*keys, *map(str, points)])]
    for key in sorted(rows):
        cells = (f"{rows[key][at]:.4g}" if at in rows[key] else "" for at in points)
        lines.append(_line([*map(str, key), *(_plain(cell) for cell in cells)]))
    return "\n".join([*head, *lines, ""])


def _plain(cell: str) -> str:
    return f"{float(cell):.0f}" if "e" in cell else cell


def _line(cells: Iterable[str]) -> str:
    return ",".join(cells)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
