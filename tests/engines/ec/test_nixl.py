"""Bundles read by NIXL, between two processes, in host memory."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from easerve.engines.vllm.launch import SITE

pytestmark = [
    pytest.mark.engines,
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"there is no {name}")
        for name in ("nixl", "torch")
    ),
]
NUM_BUNDLES = 20
SAID = re.compile(r"prefill-0|tcp:[0-9.:/]+|ready|[0-9]+")

ENCODER = """
import sys, time, torch
from pathlib import Path
from easerve.engines.vllm.ec.outbox import Outbox
from easerve.engines.vllm.ec.producer import HostCopies
from easerve.engines.vllm.ec.transport import exporter_of

outbox = Outbox(Path(sys.argv[1]), "secret", exporter_of("nixl", 4096, "cpu"))
destination = sys.stdin.readline().strip()
for number in range(int(sys.argv[2])):
    step = HostCopies({f"{number}": torch.full((5, 7), float(number), dtype=torch.bfloat16)})
    assert outbox.push(destination, [step.embedding(f"{number}")], time.monotonic_ns())
    if number == 0:
        sys.stdin.readline()
sys.stdin.readline()
outbox.close()
"""
PREFILL = """
import sys, time, torch
from pathlib import Path
from easerve.engines.vllm.ec import nixl
from easerve.engines.vllm.ec.inbox import Inbox
from easerve.engines.vllm.ec.messages import inbox_path
from easerve.engines.vllm.ec.store import Store
from easerve.engines.vllm.ec.transport import opens

reads, read = [], nixl.NixlImporter.read
nixl.NixlImporter.read = lambda *place, **how: reads.append(place) or read(*place, **how)
store = Store(1 << 20, 1000)
is_near = sys.argv[3] == "near"
place = inbox_path(Path(sys.argv[1]), "prefill-0") if is_near else "tcp://127.0.0.1:0"
inbox = Inbox(place, "secret", store, opens("nixl", "cpu"))
print("prefill-0" if is_near else f"tcp://127.0.0.1:{inbox.listener.port}", flush=True)
for number in range(int(sys.argv[2])):
    until = time.monotonic() + 10
    while store.missing([f"{number}"]):
        assert time.monotonic() < until
        time.sleep(0.001)
    if number == 0:
        print("ready", flush=True)
    memory, item = store.get(f"{number}")
    assert (memory.tensor(item) == number).all()
print(len(reads), flush=True)
sys.stdin.readline()
inbox.close()
"""


def start(code: str, folder: Path, distance: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": str(SITE), "UCX_NET_DEVICES": "lo"}
    command = [sys.executable, "-c", code, str(folder), str(NUM_BUNDLES), distance]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)


def told(process: "subprocess.Popen[str]", line: str = "") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def said(process: "subprocess.Popen[str]") -> str:
    """What it says next; NIXL says a word of its own now and then."""
    assert process.stdout is not None
    for line in process.stdout:
        if SAID.fullmatch(line.strip()):
            return line.strip()
    raise AssertionError("it has ended")


@pytest.mark.parametrize("distance", ["near", "far"])
def test_all_bundles_but_the_first_are_read_out_of_the_encoders_buffer(
    tmp_path: Path, distance: str
) -> None:
    with (
        start(PREFILL, tmp_path, distance) as prefill,
        start(ENCODER, tmp_path, distance) as encoder,
    ):
        try:
            told(encoder, said(prefill))
            assert said(prefill) == "ready"
            told(encoder)
            assert said(prefill) == str(NUM_BUNDLES - 1)
            for process in (encoder, prefill):
                told(process)
                assert process.wait(20) == 0
        finally:
            for process in (encoder, prefill):
                process.kill()
