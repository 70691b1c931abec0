"""The stages of a profile: what is refused."""

import pytest
from pydantic import ValidationError

from easerve.costs.stages import Stages

from .stages import made


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("encode", "encode: batch 8 is there 2 times"),
        ("prefill", "prefill: tokens 512 is there 2 times"),
        ("decode", r"decode: sequences, context \(8, 512\) is there 2 times"),
        ("pulls", "pulls: tokens 512 is there 2 times"),
        ("pushes", "pushes: tokens 400 is there 2 times"),
    ],
)
def test_nothing_is_there_twice(section: str, message: str) -> None:
    content = made().model_dump()
    content[section] = (*content[section], content[section][-1])
    with pytest.raises(ValidationError, match=message):
        Stages.model_validate(content)


@pytest.mark.parametrize("section", ["encode", "prefill", "decode", "pulls", "pushes", "loads"])
def test_every_stage_is_there(section: str) -> None:
    with pytest.raises(ValidationError, match=f"{section}\n"):
        Stages.model_validate(made().model_dump() | {section: ()})
