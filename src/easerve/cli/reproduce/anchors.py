"""The page's anchors: how many hold, each of them, and what hangs on a baseline's engines."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from easerve.cli.reproduce.plan import FITTED, KNOB_SETS, UNTUNED, Study
from easerve.cli.reproduce.text import (
    Cell,
    anchor_text,
    anchor_value,
    cell,
    paragraph,
    table,
)
from easerve.cli.reproduce.verdicts import Compared, Verdict, baseline

SHOWN_SET = {UNTUNED: "untuned", FITTED: "with named knobs"}
DEPENDS = "†"
"""Marks a verdict that is another one at the baseline's best topology."""


def counts(
    studies: Sequence[Study], fitted: Collection[str], found: Mapping[str, Sequence[Compared]]
) -> Iterator[str]:
    """How many hold, of those that were fitted on, held out, or no check."""
    groups: dict[str, list[Compared]] = {"fitted on": [], "held out": [], "no check": []}
    for study in studies:
        if study.name in fitted:
            group = "fitted on"
        else:
            group = "no check" if study.experiment.implied else "held out"
        groups[group] += found[study.name]
    rows: list[list[Cell]] = []
    for title, anchors in groups.items():
        for knobs in KNOB_SETS if anchors else ():
            count = Counter(each.verdicts[knobs] for each in anchors)
            row = [count[verdict] for verdict in Verdict]
            rows.append([f"{title}, {SHOWN_SET[knobs]}", len(anchors), *row])
    yield from table(["anchors", "number", *Verdict], rows)
    if groups["no check"]:
        yield "\n*No check*: a part of the scenario was inferred from the published results."


def dependent(found: Mapping[str, Sequence[Compared]]) -> str:
    """What of the verdicts hangs on the engines that a baseline was given."""
    anchors = [each for several in found.values() for each in several]
    others = [each for each in anchors if baseline(each.study, each.anchor) is not None]
    count = sum(each.depends for each in others)
    return paragraph(
        f"{len(others)} anchors are of a baseline or a ratio to one. The verdicts (untuned) of "
        f"{count or 'none'} of them depend on the topology: they are others when that baseline "
        "runs at its best topology for the very figure while all else stays."
        + (f" {DEPENDS} marks them below." if count else "")
    )


def table_of(study: Study, found: Sequence[Compared]) -> Iterator[str]:
    """Of a study, with notes."""
    yield f"\n### {study.scenario.title}\n"
    if study.experiment.implied:
        yield paragraph(f"Inferred from the published results: {study.experiment.implied}")
        yield ""
    rows: list[list[Cell]] = []
    notes: list[str] = []
    for each in found:
        anchor = each.anchor
        mark = ""
        if anchor.note and any(verdict is not Verdict.WITHIN for verdict in each.verdicts.values()):
            if anchor.note not in notes:
                notes.append(anchor.note)
            mark = f" [{notes.index(anchor.note) + 1}]"
        row = [f"{anchor_text(anchor)}{mark}", anchor_value(anchor, anchor.published)]
        row.append(anchor.source)
        for knobs in KNOB_SETS:
            mark = f" {DEPENDS}" if each.depends and knobs == UNTUNED else ""
            row += [anchor_value(anchor, each.simulated[knobs]), f"{each.verdicts[knobs]}{mark}"]
        rows.append(row)
    columns = ["figure", "published", "source"]
    for knobs in KNOB_SETS:
        columns += [SHOWN_SET[knobs], "verdict"]
    yield from table(columns, rows)
    lines = [f"[{at + 1}] {note}  " for at, note in enumerate(notes)]
    if others := [_at_best(each) for each in found if each.depends]:
        lines.append(f"{DEPENDS} At its best topology: {'; '.join(others)}.  ")
    if lines:
        yield ""
        yield from lines


def _at_best(each: Compared) -> str:
    assert each.elsewhere is not None
    value = cell(anchor_value(each.anchor, each.elsewhere.simulated))
    verdict = each.elsewhere.verdict
    return f"{anchor_text(each.anchor)}: {value} (`{each.elsewhere.topology}`), {verdict}"
