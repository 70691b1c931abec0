"""Charts as PNG files, drawn by a real browser without a network."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from easerve.bench.drawings import png
from easerve.bench.report import Chart, Section, Series, Spans
from tests.bench.drawn_results import bench
from tests.browser.chromium import CHROMIUM
from tests.cli.conftest import Easerve, easerve

__all__ = ["easerve"]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not CHROMIUM, reason="there is no chromium"),
]


@pytest.fixture(autouse=True)
def _kaleido() -> None:
    pytest.importorskip("kaleido", reason="there is no kaleido")


def test_every_chart_becomes_a_picture(tmp_path: Path) -> None:
    charts = [
        Chart("A line: one", "x", "y", [Series("a", [1, 2], [1, 2])]),
        Chart("Overlap", "time, s", "", [Spans("a", ["E"], [0], [1])], "spans"),
    ]
    paths = png.write(tmp_path / "new" / "folder", [Section("s", parts=charts)])
    assert [path.name for path in paths] == ["a-line-one.png", "overlap.png"]
    for path in paths:
        with Image.open(io.BytesIO(path.read_bytes())) as picture:
            assert picture.format == "PNG"
            assert picture.width == png.WIDTH_PX * png.SCALE
            colours = picture.convert("RGB").getcolors(1 << 24)
        assert colours is not None
        assert len(colours) > 20  # not an empty sheet


def test_a_report_without_charts_writes_nothing(tmp_path: Path) -> None:
    assert png.write(tmp_path / "folder", [Section("s", "text")]) == []


def test_the_command_writes_pictures(easerve: Easerve, tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    nothing = dict.fromkeys(bench()["requests"], ())
    result.write_text(json.dumps(bench(requests=nothing, timeline=None)))
    ended = easerve("report", result, "--png", tmp_path / "out")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"2 pictures: {tmp_path / 'out'}\n"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"goodput-by-tier.png", "attainment-by-tier.png"}


def test_a_browser_that_is_not_there_is_said(
    easerve: Easerve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "absent"))
    result = tmp_path / "r.json"
    result.write_text(json.dumps(bench()))
    ended = easerve("report", result, "--png", tmp_path / "out")
    assert ended.code == 1
    assert ended.err.startswith("easerve: PNG files need Chrome or Chromium")
