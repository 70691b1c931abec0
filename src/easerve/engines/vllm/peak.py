"""What a device can do with all its units: FLOP/s of a matrix product, bytes/s of a copy.

Run as ``python -m easerve.engines.vllm.peak DEVICE DTYPE``, while nothing else runs on the device;
writes a JSON object ``{"flops_per_s", "bytes_per_s", "how"}``. The threads of a CPU are those of
OMP_NUM_THREADS. Products grow until one takes long enough, the best run of all counts.
"""

import json
import sys
import time
from collections.abc import Callable

import torch

NUM_RUNS = 5
LONG_S = 0.05
SIDES = (512, 1024, 2048, 4096, 8192)
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}


def best_s(device: str, run: Callable[[], object]) -> float:
    """Seconds of the fastest run, after one that does not count."""
    seconds = []
    for _ in range(NUM_RUNS + 1):
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def product_flops_per_s(device: str, dtype: torch.dtype) -> tuple[float, int]:
    """The most that a product of two square matrices reaches, and their sides."""
    reached = []
    for side in SIDES:
        left = torch.rand((side, side), device=device).to(dtype)
        right, product = left.T.contiguous(), torch.empty_like(left)
        seconds = best_s(device, lambda a=left, b=right, c=product: torch.mm(a, b, out=c))  # type: ignore[misc]
        reached.append((2 * side**3 / seconds, side))
        if seconds > LONG_S:
            break
    return max(reached)


def copy_bytes_per_s(device: str) -> float:
    """Read and written."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES[device] / best_s(device, lambda: target.copy_(source))


def main() -> None:
    device, dtype = sys.argv[1:]
    flops_per_s, side = product_flops_per_s(device, getattr(torch, dtype))
    bytes_per_s = copy_bytes_per_s(device)
    how = f"a {dtype} product of {side}x{side} matrices; a copy of {COPY_BYTES[device] >> 20} MiB"
    if device == "cpu":
        how += f"; {torch.get_num_threads()} threads"
    print(json.dumps({"flops_per_s": flops_per_s, "bytes_per_s": bytes_per_s, "how": how}))


if __name__ == "__main__":
    main()
