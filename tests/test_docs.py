"""The documents speak of what exists, and stay short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/easerve"


@pytest.mark.parametrize("name", ["README.md", "DESIGN.md"])
def test_a_document_is_read_in_one_go(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= 150


def test_every_module_has_its_line_in_the_map_and_every_line_its_module() -> None:
    section = (ROOT / "DESIGN.md").read_text().split("## Modules")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named: set[str] = set()
    for row in rows:
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            path = name if "/" in name else f"{folder}{name}"
            folder = path.rpartition("/")[0] + "/" if "/" in path else ""
            named.add(path)
    written = {str(path.relative_to(PACKAGE).with_suffix("")) for path in PACKAGE.rglob("*.py")}
    modules = {path for path in written if not path.endswith("__init__")}
    assert {name for name in named if "*" not in name} <= modules
    assert {path for path in modules if not path.startswith("cli/")} <= named


@pytest.mark.parametrize("name", ["README.md", "DESIGN.md"])
def test_files_and_targets_that_a_document_names_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    targets = set(re.findall(r"`make ([a-z-]+)`", text))
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    links = re.findall(r"\]\((?!http)([^)]+)\)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []
