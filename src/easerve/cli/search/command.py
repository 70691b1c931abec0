"""``easerve search``: find the deployment, and write it down as the file that ``serve`` takes."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from easerve import __version__
from easerve.bench import report
from easerve.bench.reference import command_of
from easerve.cli.bench.command import check_writable, progress, show
from easerve.cli.search import compare, shown
from easerve.cli.search import result as results
from easerve.cli.search.confirm import Side, confirmed, in_words
from easerve.cli.search.prepare import (
    Common,
    Live,
    Prepared,
    Simulated,
    is_scenario,
    on_engines,
    on_simulator,
)
from easerve.cluster.local import EngineStartError
from easerve.config import ConfigError
from easerve.engines.protocol import EngineError
from easerve.search import best
from easerve.search.importance import importance
from easerve.search.methods.method import METHODS, method
from easerve.search.objective import Unworkable
from easerve.search.storage import StorageError, path_of
from easerve.search.study import Study
from easerve.search.trials import Trial
from easerve.search.trials import best as winner_of

INTERRUPTED, NO_WINNER = 130, 1
MAX_SEED, MAX_GPU = 1 << 53, 1 << 16


@dataclass(frozen=True, slots=True)
class Asked:
    """``storage`` None: in memory, so that nothing is left. ``study`` None: by source and method.

    ``num_rounds``: of the winner beside the source as it is. ``compare_seeds``: studies of each
    method that are compared; 0: none. ``jobs``: processes, for trying all configurations.
    ``only_show``: say what would be searched, and search nothing.
    """

    common: Common
    simulated: Simulated
    live: Live | None
    method: str
    num_trials: int
    seed: int
    storage: Path | None
    study: str | None
    num_rounds: int
    compare_seeds: int
    jobs: int
    only_show: bool
    out: Path | None
    html: Path | None
    as_json: bool

    @property
    def study_name(self) -> str:
        return self.study or f"{self.common.path.stem} {self.method} seed {self.seed}"


class Said:
    """What a live objective says that it is doing; shown while there is something to show it."""

    def __init__(self) -> None:
        self.to: Callable[[str], None] = lambda _: None

    def __call__(self, text: str) -> None:
        self.to(text)


def run(asked: Asked) -> int:
    """The exit code: 1 also where no configuration keeps the promise. Raises ConfigError."""
    console = Console(stderr=asked.as_json)
    if asked.method not in METHODS:
        raise ConfigError(f"--method: {asked.method!r} is none of {', '.join(METHODS)}")
    for path in (asked.out, asked.html):
        if path is not None:
            check_writable(path)
    try:
        said = Said()
        found = prepared(asked, said, console)
        if asked.only_show:
            told = {"kind": "search-space", **found.question.as_dict()}
            _tell(told, [*shown.space(told)], asked, console)
            return 0
        if asked.compare_seeds:
            return _compare(asked, found, console)
        return _search(asked, found, said, console)
    except (EngineStartError, EngineError) as error:
        print(f"easerve: {error}", file=sys.stderr)
        return 1
    except StorageError as error:
        raise ConfigError(str(error)) from None
    except KeyboardInterrupt:
        print(f"easerve: stopped; {_goes_on(asked)}", file=sys.stderr)
        return INTERRUPTED


def storage_of(text: str | None) -> Path | None:
    """Of a path or a URL, as ``optuna-dashboard`` has it. Raises ConfigError."""
    try:
        return None if text is None else path_of(text)
    except StorageError as error:
        raise ConfigError(f"--storage {error}") from None


def prepared(asked: Asked, said: Said, console: Console) -> Prepared:
    """Raises ConfigError, EngineStartError, EngineError."""
    if is_scenario(asked.common.path):
        return on_simulator(asked.common, asked.simulated)
    assert asked.live is not None, "a deployment file is tried on engines"
    return on_engines(asked.common, asked.live, said, console)


def _goes_on(asked: Asked) -> str:
    if asked.storage is None:
        return "nothing is kept without --storage"
    return f"the same command goes on where it was ({asked.storage})"


def _compare(asked: Asked, found: Prepared, console: Console) -> int:
    """All configurations and all methods. Raises ConfigError."""
    if found.question.live:
        raise ConfigError("--compare tries every configuration, which takes days on engines")
    space = found.question.space
    total = compare.num_steps(space, asked.compare_seeds)
    with terminated(), progress(console, total) as tick:
        name = f"{asked.common.path.stem} {asked.common.space} exhaustive"
        grid = method("grid", space, 0)
        study = Study(asked.storage, name, space, found.objective, grid, prune=False)
        everything = compare.exhausted(study, space, asked.jobs, tick)
        told = compare.compared(found, everything, asked.num_trials, asked.compare_seeds, tick)
    told["command"] = _command()
    _tell(told, compare.sections(told), asked, console)
    return 0


def _search(asked: Asked, found: Prepared, said: Said, console: Console) -> int:
    question, objective = found.question, found.objective
    chosen = method(asked.method, question.space, asked.seed, found.candidates)
    if asked.out is not None:
        found.winner(found.candidates[0].starts[0])  # to hear now, if it cannot be written
    begin_s = time.monotonic()
    with found.entered, terminated():
        study = Study(asked.storage, asked.study_name, question.space, objective, chosen)
        with _trials(console, asked.num_trials, study.trials, said) as tick:
            trials = study.run(asked.num_trials, tick)
    facts = {
        "study": asked.study_name,
        "storage": None if asked.storage is None else str(asked.storage),
        "method": asked.method,
        "seed": asked.seed,
    }
    wall_s = time.monotonic() - begin_s
    told = results.of_study(question, objective, facts, trials, wall_s)
    told["command"] = _command()
    told["importance"] = importance(question.space, trials)
    won = winner_of(trials)
    if won is not None and asked.num_rounds and found.before is not None:
        told["confirmation"] = _confirmed(asked, found, won, said, console)
    if won is not None and asked.out is not None:
        content = found.winner(won.configuration)
        best.write(asked.out, content, remarks(told))
        told["file"] = str(asked.out)
    _tell(told, shown.sections(told), asked, console)
    return 0 if won is not None else NO_WINNER


def _confirmed(
    asked: Asked, found: Prepared, won: Trial, said: Said, console: Console
) -> results.Result | None:
    """None, with a word, where one of the two could not be tried any more."""
    first = max(asked.common.seeds) + 1
    seeds = range(first, first + asked.num_rounds)
    winner = Side(found.objective, won.configuration, found.entered)
    assert found.before is not None, "it can be tried"
    try:
        with terminated(), progress(console, 2 * asked.num_rounds) as tick:
            return confirmed(found.before, winner, seeds, tick)
    except Unworkable as error:
        print(f"easerve: not confirmed: {error}", file=sys.stderr)
        return None


def _command() -> str:
    return command_of(["easerve", *sys.argv[1:]])


def remarks(told: results.Result) -> Iterator[str]:
    """What stands above the winner in its file."""
    won, second = told["best"], told["runner_up"]
    yield f"Found by easerve search {told['source']} (easerve {__version__})."
    storage = f" in {told['storage']}" if told["storage"] else ", which was not kept"
    yield f"Study {told['study']!r}{storage}, trial {won['trial']} of {told['num_trials']}."
    yield (
        f"{told['method']}, seed {told['seed']}: {told['num_candidates']} of "
        f"{len(told['allocations'])} allocations, {told['num_configurations']} configurations."
    )
    yield f"Goodput {shown.with_confidence(won)}, {told['objective']}: {shown.promise(told)}."
    yield f"Load: {told['load']}, seeds {', '.join(map(str, told['seeds']))}."
    yield f"Allocation {won['allocation']}: {shown.knobs(won)}."
    if (told_so := told.get("confirmation")) is not None:
        yield f"It has {in_words(told_so, told['source'])}."
    if second is not None:
        yield (
            f"Runner-up: trial {second['trial']}, {second['allocation']}, {shown.knobs(second)}: "
            f"{shown.with_confidence(second)}."
        )


@contextmanager
def terminated() -> Iterator[None]:
    """SIGTERM is as good as Ctrl-C."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _trials(
    console: Console, num_trials: int, before: Sequence[Trial], said: Said
) -> Iterator[Callable[[Trial], None]]:
    """``before``: of earlier runs."""
    text, now = TextColumn("{task.description}"), TextColumn("{task.fields[now]}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), now)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("trials", total=num_trials, now="")
        said.to = lambda text: bar.update(task, now=text)
        known = [each for each in before if each.state != "running"]

        def tick(trial: Trial) -> None:
            known.append(trial)
            won = winner_of(known)
            told = "none keeps the promise yet"
            if won is not None:
                told = f"best {won.goodput_per_s:.3g}/s, {won.configuration.allocation}"
            bar.update(task, completed=len(known), description=told)

        yield tick


def _tell(
    told: results.Result, sections: Sequence[report.Section], asked: Asked, console: Console
) -> None:
    if asked.as_json:
        print(json.dumps(told))
    else:
        show(sections, console)
    if asked.storage is not None and "trials" in told:
        hint = f"study: optuna-dashboard sqlite:///{asked.storage}"
        console.print(hint, soft_wrap=True, highlight=False)
    if "file" in told:
        console.print(f"deployment: {told['file']}", soft_wrap=True)
    if asked.html is not None:
        asked.html.write_text(report.html(f"Search: {told['title']}", sections))
        console.print(f"report: {asked.html}", soft_wrap=True)
