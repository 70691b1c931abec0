"""The documents' clients, as they stand there, against a server that was started as they say."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import ADMIN_TOKEN, ROOT, RealServer

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> Iterator[tuple[str, str]]:
    """Language and text of each block that talks to the server."""
    for name in ("README.md", "docs/api.md", "docs/batching.md"):
        for language, text in BLOCK.findall((ROOT / name).read_text()):
            if "127.0.0.1:8000" in text and "bench" not in text:
                yield language, text


EXAMPLES = list(examples())


def run(language: str, text: str, server: RealServer) -> str:
    text = text.replace("http://127.0.0.1:8000", server.url).replace("TOKEN", ADMIN_TOKEN)
    command = [sys.executable, "-c", text] if language == "python" else ["bash", "-c", text]
    output = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert output.returncode == 0, output.stderr
    return output.stdout


def test_there_are_examples() -> None:
    assert [language for language, _ in EXAMPLES] == ["", "python", "", ""]


@pytest.mark.parametrize(("language", "text"), EXAMPLES, ids=["picture", "sdk", "tools", "knobs"])
def test_an_example_works(server: RealServer, language: str, text: str) -> None:
    said = run(language, text, server)
    if language == "python":
        assert said.strip()
        return
    if "knobs" in text:
        assert json.loads(said)["when"] == "gap"
        return
    choice = json.loads(said)["choices"][0]
    if "tools" in text:
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "look"
    else:
        assert choice["message"]["content"].strip() in ("one", "two", "three")
        assert choice["finish_reason"] == "stop"


# Benches: as they stand there, but with fewer requests; what they write goes elsewhere.
FEWER = {
    "easerve bench --url": "--num-requests 12 --allow-late",
    "easerve bench goodput": "--rates 4 --num-requests 12 --seeds 1 --duration 1",
    "easerve bench reference": "--num-requests 4 --warmup 2 --out reference.yaml",
}


def benches() -> Iterator[str]:
    for name in ("README.md", "docs/bench.md"):
        for _, text in BLOCK.findall((ROOT / name).read_text()):
            lines = text.replace("\\\n", " ").splitlines()
            yield from (line for line in lines if "easerve bench" in line and "--url" in line)


@pytest.mark.parametrize("line", list(dict.fromkeys(benches())))
def test_a_bench_works(server: RealServer, tmp_path: Path, line: str) -> None:
    command = line.partition("#")[0].replace("http://127.0.0.1:8000", server.url)
    command = command.replace(".venv/bin/easerve", f"{sys.executable} -m easerve.cli.main")
    (fewer,) = (fewer for start, fewer in FEWER.items() if start in line)
    output = subprocess.run(
        ["bash", "-c", f"{command.strip()} {fewer}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert output.returncode == 0, output.stdout + output.stderr
    for option in ("--html", "--out"):
        if option in command:
            assert (tmp_path / command.split(option)[1].split()[0]).stat().st_size > 1000
