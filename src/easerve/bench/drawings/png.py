"""Charts as PNG files, drawn by the very plotly.js of the page in a browser without a window."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from easerve.bench.drawings.axes import plain
from easerve.bench.drawings.figure import TITLE_HEIGHT_PX, figure, height_px
from easerve.bench.drawings.parts import Chart, Section

WIDTH_PX = 900
SCALE = 2
MAX_NAME = 80
NO_KALEIDO = "PNG files need kaleido: pip install 'easerve[png]'"
NO_BROWSER = "PNG files need Chrome or Chromium: install one, or say where it is in BROWSER_PATH"


class PngError(RuntimeError):
    """There is nothing to draw with, or drawing failed; the message says what to do."""


def write(folder: Path, sections: Sequence[Section]) -> list[Path]:
    """A file for each chart, named by its title; what has that name is written over.

    Raises PngError, and OSError if the folder cannot be made.
    """
    try:
        import kaleido
        from kaleido.errors import BrowserFailedError, ChromeNotFoundError, KaleidoError
    except ImportError:
        raise PngError(NO_KALEIDO) from None
    jobs = [_job(folder / name, chart) for name, chart in named(sections)]
    if not jobs:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # No mathjax: it would come from the network.
        options = {"mathjax": False}
        kaleido.write_fig_from_object_sync(jobs, kopts=options, cancel_on_error=True)
    except ChromeNotFoundError:
        raise PngError(NO_BROWSER) from None
    except (BrowserFailedError, KaleidoError, TimeoutError) as error:
        words = str(error).strip() or type(error).__name__
        raise PngError(f"the browser drew no PNG files: {words}") from None
    return [Path(job["path"]) for job in jobs]


def named(sections: Sequence[Section]) -> Iterator[tuple[str, Chart]]:
    """Charts with the names of their files: their titles, behind their sections' if need be."""
    charts = [
        (section, part) for section in sections for part in section.parts if isinstance(part, Chart)
    ]
    times = Counter(_slug(chart.title) for _, chart in charts)
    taken: Counter[str] = Counter()
    for section, chart in charts:
        name = _slug(chart.title)
        if times[name] > 1:
            name = _slug(f"{section.title} {chart.title}")
        taken[name] += 1
        yield f"{name}-{taken[name]}.png" if taken[name] > 1 else f"{name}.png", chart


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower())[:MAX_NAME].strip("-") or "chart"


def _job(path: Path, chart: Chart) -> dict[str, Any]:
    drawn = figure(chart)
    layout = drawn["layout"]
    layout["title"] = {"text": plain(chart.title), "x": 0, "xref": "paper", "yref": "container"}
    layout["title"] |= {"y": 0.97, "yanchor": "top", "font": {"size": 16}}
    layout["margin"]["t"] += TITLE_HEIGHT_PX
    layout |= {"paper_bgcolor": "white", "plot_bgcolor": "white"}
    height = height_px(chart) + TITLE_HEIGHT_PX
    layout["height"] = height
    options = {"format": "png", "width": WIDTH_PX, "height": height, "scale": SCALE}
    return {"fig": drawn, "path": str(path), "opts": options}
