import subprocess
import sys
from pathlib import Path

import pytest

from easerve import __version__

from .conftest import Easerve


def test_the_version_is_shown(easerve: Easerve) -> None:
    ended = easerve("--version")
    assert (ended.code, ended.out) == (0, f"easerve {__version__}\n")


def test_the_installed_command_is_this_one() -> None:
    command = str(Path(sys.executable).with_name("easerve"))
    shown = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"easerve {__version__}\n"


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_names_every_command(easerve: Easerve, words: tuple[str, ...]) -> None:
    ended = easerve(*words)
    assert ended.code == (0 if words else 2)
    for command in ("serve", "demo", "doctor", "replay"):
        assert command in ended.out + ended.err


@pytest.mark.parametrize("command", ["serve", "demo", "doctor", "replay"])
def test_every_command_explains_itself(easerve: Easerve, command: str) -> None:
    ended = easerve(command, "--help")
    assert ended.code == 0
    assert f"easerve {command}" in ended.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("srve",), "srve"),
        (("serve",), "FILE.yaml"),
        (("serve", "owner/name", "--prt", "1"), "--prt"),
        (("serve", "owner/name", "--port", "high"), "--port"),
        (("demo", "--seed", "x"), "--seed"),
        (("doctor", "now"), "now"),
    ],
)
def test_wrong_words_are_a_usage_error_that_names_them(
    easerve: Easerve, words: tuple[str, ...], named: str
) -> None:
    ended = easerve(*words)
    assert (ended.code, ended.out) == (2, "")
    assert named in ended.err


def test_help_and_version_import_nothing_heavy() -> None:
    code = """
import sys
from easerve.cli.main import app
heavy = ("torch", "vllm", "fastapi", "aiohttp", "pydantic", "PIL")
print(*(name for name in heavy if name in sys.modules))
"""
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.split() == []
