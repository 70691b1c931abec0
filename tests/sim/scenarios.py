"""A scenario that is small enough for tests, and runs fast."""

from pathlib import Path
from typing import Any

import yaml

from easerve.config import merge

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "scenarios"
SMALL: dict[str, Any] = {
    "title": "small",
    "model": "llava-v1.6-34b",
    "hardware": "rtx6000-ada",
    "num_gpus": 8,
    "costs": {"source": "roofline"},
    "workload": {"rate_per_s": 2, "num_requests": 20, "preset": "random-mm"},
    "slo": {"ttft_ref_s": 1.0, "tpot_ref_s": 0.052, "ttft": "2s", "tpot": "80ms"},
    "systems": {
        "easerve": {
            "encode": {"replicas": 2},
            "local_prefill": {"tensor_parallel_size": 2},
            "partition": {},
            "prefill": {"tensor_parallel_size": 2},
            "decode": {"replicas": 2, "tensor_parallel_size": 2},
            "policy": {"remote_share": 0.5},
        }
    },
}


def write(path: Path, **over: Any) -> Path:
    """A file with the small scenario, and what is laid on it."""
    path.write_text(yaml.safe_dump(merge(SMALL, over)))
    return path
