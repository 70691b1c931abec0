"""A headless Chromium that reads pages from files, and what can be asked of it."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_S = 30.0
DRAWN = """
return [...document.querySelectorAll('.plotly-graph-div')].map((chart) => {
  const drawn = chart.querySelector('svg.main-svg, canvas');
  const box = drawn ? drawn.getBoundingClientRect() : {width: 0, height: 0};
  const room = chart.getBoundingClientRect();
  const marks = chart.querySelectorAll('.scatterlayer path, .barlayer path, .annotation').length;
  return [chart.id, box.width, box.height, room.width, marks];
});
"""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chart on the page: the size of what was drawn, the room that it has, its marks."""

    name: str
    width: float
    height: float
    room: float
    num_marks: int


class Browser:
    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, page: Path, width: int, is_dark: bool = False) -> None:
        """With a window of so many pixels; until every chart is drawn."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._driver.get(page.as_uri())
        end = time.monotonic() + WAIT_S
        while any(each.num_marks == 0 for each in self.drawn()) and time.monotonic() < end:
            time.sleep(0.05)

    def drawn(self) -> list[Drawn]:
        return [Drawn(*each) for each in self._driver.execute_script(DRAWN)]

    def run(self, script: str) -> Any:
        return self._driver.execute_script(script)

    def width(self) -> int:
        """Of the document; more than the window is where the page scrolls sideways."""
        return int(self.run("return document.documentElement.scrollWidth"))

    def complaints(self) -> list[str]:
        """All that the console has been told since last asked, warnings too."""
        return [each["message"] for each in self._driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses of all that the page has asked for, beyond itself."""
        names = "performance.getEntriesByType('resource').map((each) => each.name)"
        return [str(name) for name in self.run(f"return {names}")]

    def pdf(self) -> bytes:
        import base64

        return base64.b64decode(self._driver.execute_cdp_cmd("Page.printToPDF", {})["data"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """``profile``: an empty folder for what it writes."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    assert CHROMIUM is not None
    assert DRIVER is not None
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for switch in (*SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # A driver that is named is not looked for elsewhere.
    driver = Chrome(options=options, service=Service(executable_path=DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
