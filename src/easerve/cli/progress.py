"""What a person sees while engines start: a line per engine, live on a terminal, else plain."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

READY = "ready"


class StartProgress:
    """Call it with (name, state); a state of ``ready`` ends the line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begin = time.monotonic()
        self._states: dict[str, str] = {}
        self._ready_s: dict[str, float] = {}
        self._spinner = Spinner("dots")
        self._live = Live(
            get_renderable=self._table,
            console=console,
            refresh_per_second=8,
            transient=False,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the lines as they are."""
        self._live.stop()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    def __call__(self, name: str, state: str) -> None:
        self._states[name] = state
        if state == READY:
            self._ready_s[name] = self.elapsed_s
        if not self._console.is_terminal:
            self._console.print(f"{self.elapsed_s:6.1f} s  {name}: {state}")

    def _table(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, state in self._states.items():
            done = self._ready_s.get(name)
            mark = Text("✓", "green") if done is not None else self._spinner
            seconds = done if done is not None else self.elapsed_s
            table.add_row(mark, name, f"{seconds:5.1f} s", Text(state, "dim"))
        return table
