"""What a request takes that has the system to itself: the tiers are multiples of it.

One file per model, machine and modality, measured once and frozen: every system that is compared
is judged by the same file, or a slow system would be given more time than a quick one.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from math import isclose
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AwareDatetime, Field, model_validator
from yarl import URL

from easerve import __version__
from easerve.config import ConfigError, Positive, Seconds, Section, read_section
from easerve.engines.partition.facts import gather
from easerve.goodput import TIERS, Record, Slo, parse_slo, tier

ALL = "all"
HEAD = """\
# Written by easerve bench reference. Frozen: all systems that are compared are judged by this file.
# Seconds of requests that had the system to themselves; ttft_s and tpot_s are the medians.
"""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
REDACTED = "***"
SECRETS = ("--api-key",)
PASSWORD = re.compile(r"//[^/@\s]*@")
Text = Annotated[str, Field(min_length=1)]
Times = Annotated[tuple[Seconds, ...], Field(min_length=1)]


class Reference(Section):
    """``machine``: what the engines ran on, a CPU and its cores, or GPUs in the user's words.

    ``system``: what served. ``modality`` and ``workload``: as ``easerve bench`` was asked for them.
    ``ttft_s``, ``tpot_s``: the medians of ``ttfts_s`` and ``tpots_s``, in the order of the
    requests. ``num_requests`` includes those of a single token, which have no TPOT.
    """

    schema_version: Literal[1] = 1
    made: AwareDatetime
    easerve: Text
    command: Text
    machine: Text
    model: Text
    system: Text
    modality: Text
    workload: dict[str, Any]
    num_requests: Positive
    ttft_s: Seconds
    tpot_s: Seconds
    ttfts_s: Times
    tpots_s: Times

    @model_validator(mode="after")
    def _medians_are_those_of_the_samples(self) -> Self:
        for name, value, samples in (
            ("ttft_s", self.ttft_s, self.ttfts_s),
            ("tpot_s", self.tpot_s, self.tpots_s),
        ):
            if not isclose(value, median(samples), rel_tol=1e-6):
                raise ValueError(f"{name} is {value}, but its samples' median {median(samples)}")
        return self

    @property
    def name(self) -> str:
        return f"{self.model}, {self.modality}, on {self.machine}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the keys are those of the file."""
        return self.model_dump(mode="json")


def resolve(texts: Sequence[str], reference: Reference | None) -> dict[str, Slo]:
    """Objectives by name, in the order given: tiers (``S1``, ``S1,S3``, ``all``) or explicit ones.

    An explicit one is called by its own text. Raises ConfigError for one that cannot be read, and
    for a tier without a reference.
    """
    slos: dict[str, Slo] = {}
    for text in texts:
        if names := tiers_of(text):
            if reference is None:
                raise ConfigError(f"--slo {text}: {NO_REFERENCE}")
            slos |= {name: tier(name, reference.ttft_s, reference.tpot_s) for name in names}
        else:
            slos[" ".join(text.split())] = _explicit(text)
    return slos


def tiers_of(text: str) -> list[str]:
    """The tiers that an objective names; none when it is an explicit one."""
    names = [name.strip() for name in text.split(",")]
    if ALL in map(str.lower, names):
        return list(TIERS)
    upper = [name.upper() for name in names]
    return upper if all(name in TIERS for name in upper) else []


def _explicit(text: str) -> Slo:
    try:
        return parse_slo(text)
    except ValueError as error:
        raise ConfigError(f"--slo: {error}; or name tiers: {', '.join(TIERS)} or {ALL}") from None


def chosen(
    texts: Sequence[str],
    given: Path | None,
    model: str,
    machine: str | None,
    modality: str,
    folders: Sequence[Path] | None = None,
) -> Reference | None:
    """The reference for these objectives: the file given, else the one of this model and machine.

    None when none is given and no objective is a tier. ``machine`` is None when nobody knows what
    serves. ``folders``: in place of the usual ones. Raises ConfigError that says how to make one.
    """
    if given is not None:
        return read_section(given, Reference)
    if not any(map(tiers_of, texts)):
        return None
    if machine is None:
        raise ConfigError(
            f"--slo {' '.join(texts)}: tiers are multiples of a reference for the machine that "
            "serves, and it is not this one: name it with --machine, or a file with --reference"
        )
    places = [folder / path_of(machine, model, modality) for folder in folders or search_path()]
    path = next(filter(Path.is_file, places), None)
    if path is None:
        looked = " nor ".join(map(str, places))
        raise ConfigError(f"--slo {' '.join(texts)}: there is neither {looked}: {NO_REFERENCE}")
    reference = read_section(path, Reference)
    if found := differences(reference, model, modality, {}, machine):
        raise ConfigError(f"{path} is not what its path says: {'; '.join(found)}")
    return reference


NO_REFERENCE = (
    "tiers are multiples of what a request takes alone: make a reference with `easerve bench "
    "reference --url … --model …`, name one with --reference, or give limits (ttft=2s,tpot=80ms)"
)


def search_path() -> list[Path]:
    """Where references are looked for, in this order."""
    return [Path("references"), state_folder()]


def state_folder() -> Path:
    root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(root) / "easerve/references"


def machine_of(url: str, given: str | None = None) -> str | None:
    """What serves behind ``url``: what the user says, else this CPU if that is a loopback address.

    None for another host. Which GPUs of this machine serve cannot be seen: the user says it.
    """
    if given is not None:
        return given
    return this_cpu() if URL(url).host in LOOPBACK else None


def this_cpu() -> str:
    facts = gather("cpu")
    return f"{facts.cpu}, {len(facts.cores)} core{'s' * (len(facts.cores) != 1)}"


def differences(
    reference: Reference,
    model: str,
    modality: str,
    workload: Mapping[str, Any],
    machine: str | None = None,
) -> list[str]:
    """What of a run is not as in the reference, a phrase each; to be said, for tiers rest on it.

    Of the workload, what only one of the two has is left out. ``machine`` None: not compared.
    """
    run = {"model": model, "modality": modality}
    if machine is not None:
        run["machine"] = machine
    pairs = [(key, value, getattr(reference, key)) for key, value in run.items()]
    both = sorted(reference.workload.keys() & workload.keys())
    pairs += [(key, workload[key], reference.workload[key]) for key in both]
    return [f"{key} {now!r}, in the reference {was!r}" for key, now, was in pairs if now != was]


def isolated(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """TTFTs and TPOTs, in seconds (to the microsecond), of requests sent one at a time.

    Raises ValueError when one was not completed, when two overlap, or when there is nothing to
    take a median of.
    """
    if lost := sum(record.outcome != "completed" for record in records):
        raise ValueError(f"{lost} of {len(records)} requests were not completed")
    ordered = sorted(records, key=lambda record: record.sent_s)
    for earlier, later in pairwise(ordered):
        if earlier.end_s is not None and later.sent_s < earlier.end_s:
            raise ValueError("two requests were open at once: none had the system to itself")
    ttfts_s = [round(each.ttft_s, 6) for each in records if each.ttft_s is not None]
    tpots_s = [round(each.tpot_s, 6) for each in records if each.tpot_s is not None]
    if not ttfts_s or not tpots_s:
        raise ValueError("answers must be streamed, and of two tokens or more, to be measured")
    return ttfts_s, tpots_s


def make(
    records: Sequence[Record],
    *,
    words: Sequence[str],
    machine: str,
    model: str,
    system: str,
    modality: str,
    workload: Mapping[str, Any],
    made: datetime | None = None,
) -> Reference:
    """Of isolated requests. ``words``: the command line. Raises ValueError, as ``isolated``."""
    ttfts_s, tpots_s = isolated(records)
    return Reference(
        made=made or datetime.now(UTC).replace(microsecond=0),
        easerve=__version__,
        command=command_of(words),
        machine=machine,
        model=model,
        system=system,
        modality=modality,
        workload=dict(workload),
        num_requests=len(records),
        ttft_s=round(median(ttfts_s), 7),
        tpot_s=round(median(tpots_s), 7),
        ttfts_s=tuple(ttfts_s),
        tpots_s=tuple(tpots_s),
    )


def command_of(words: Sequence[str]) -> str:
    """A command line without what must not be known: keys, and passwords in addresses."""
    shown: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, _ = word.partition("=")
        if before in SECRETS:
            shown.append(REDACTED)
        elif option in SECRETS and equals:
            shown.append(f"{option}={REDACTED}")
        else:
            shown.append(PASSWORD.sub("//", word))
    return shlex.join(shown)


def path_of(machine: str, model: str, modality: str) -> Path:
    """``<machine>/<model>-<modality>.yaml``, in plain letters."""
    name = f"{model.rstrip('/').rpartition('/')[2]}-{modality}"
    return Path(_plain(machine)) / f"{_plain(name)}.yaml"


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "-"


def write(reference: Reference, path: Path, force: bool = False) -> None:
    """Whole or not at all; the folder is made.

    Raises ConfigError, also when the file exists, unless ``force``: it is frozen.
    """
    check_new(path, force)
    content = yaml.safe_dump(
        reference.as_dict(), sort_keys=False, default_flow_style=None, width=100
    )
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(HEAD + content)
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def check_new(path: Path, force: bool = False) -> None:
    """Raises ConfigError when the file exists, unless ``force``: before measuring, not after."""
    if path.exists() and not force:
        raise ConfigError(
            f"{path} exists, and what was measured with it would no longer compare: "
            "choose another file, or --force"
        )
