import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from easerve.cli import advise as command
from easerve.cli.advise import Asked
from easerve.cli.advise_deployment import Given, content_of
from easerve.config import ConfigError
from easerve.sim.scenario import build

from ..sim.scenarios import ROOT, write

PROFILE = ROOT / "profiles" / "amd-epyc-2-cores" / "tiny-llava.yaml"
DEPLOYMENT = ROOT / "examples" / "tiny-llava.yaml"
QUICK: dict[str, Any] = {"seeds": (1,), "max_requests": 20, "chunks": ()}
SHAPES = (
    "workload.items=[{image: 60x60}]",
    "workload.text_tokens=[16, 24]",
    "workload.output_tokens=[8, 64]",
)
TWO = {
    "num_gpus": 2,
    "system": "vllm",
    "systems": {"easerve": None, "vllm": {"replicas": 1, "tensor_parallel_size": 2}},
}


@pytest.fixture
def two_gpus(tmp_path: Path) -> Path:
    return write(tmp_path / "two.yaml", **TWO)


def said(capsys: pytest.CaptureFixture[str], asked: Asked) -> str:
    assert command.run(asked) == 0
    return capsys.readouterr().out


def error_of(path: Path, **asked: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        command.run(Asked(path, **{**QUICK, **asked}))
    return str(raised.value)


def test_json_has_the_keys_that_scripts_rely_on(
    two_gpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Asked(two_gpus, rates_per_s=(0.5,), slo="ttft=10s,tpot=200ms", as_json=True, **QUICK)
    found = json.loads(said(capsys, asked))
    assert (found["verdict"], found["winner"]) == ("do not split", "aggregated")
    assert found["break_even_per_s"] is None
    assert "an engine of each kind needs 3 devices in all, and there are 2" in found["reason"]
    assert found["slo"]["ttft_s"] == 10
    (system,) = found["systems"].values()
    assert system["topology"] == "tp2"
    assert system["capacity_is_at_least"] is True
    assert system["points"][0]["attainment"] == 1
    assert system["gpu_s_per_request"] == pytest.approx(2 / system["best_goodput_per_s"])
    assert found["impossible"].keys() == {"E+PD", "E+P+D", "EAServe"}


def test_a_verdict_is_said_and_drawn(
    two_gpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "advice.html"
    text = said(capsys, Asked(two_gpus, rates_per_s=(0.5,), html=html, **QUICK))
    assert "Verdict: do not split. Use aggregated (tp2). Because nothing can be split" in text
    assert "Promise: TTFT 12 s, TPOT 96.2 ms" in " ".join(text.split())
    page = html.read_text()
    for title in ("Split or not: small", "Attainment", "Goodput"):
        assert title in page


def test_a_deployment_file_becomes_a_scenario() -> None:
    given = Given(profile=PROFILE)
    content = content_of(DEPLOYMENT, given)
    assert content["model"] == "tiny-llava"
    assert content["hardware"] == "cpu-2-cores"
    assert content["num_gpus"] == 3
    assert content["systems"]["easerve"]["decode"] == {
        "max_num_seqs": 16,
        "kv_cache_tokens": 43690,
    }
    content["workload"]["items"] = [{"image": "60x60"}]
    assert build(content, "it").costs.source == "profile"


def test_a_deployment_file_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked(
        DEPLOYMENT,
        rates_per_s=(20.0,),
        slo="S5",
        over=SHAPES,
        as_json=True,
        given=Given(profile=PROFILE),
        **{**QUICK, "max_requests": 10},
    )
    found = json.loads(said(capsys, asked))
    assert found["systems"].keys() == {"aggregated", "E+PD", "E+P+D", "EAServe"}
    assert found["slo"]["name"] == "S5"
    assert 0.001 < found["slo"]["tpot_s"] < 0.1  # a multiple of what a request alone takes


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"slo": "S9"}, "--slo: 'S9' is not like ttft=2s"),
        ({"given": Given(hardware="l40s")}, "--hardware go with deployment files"),
        ({"variant": "none"}, "experiment has no variant 'none'"),
    ],
)
def test_what_cannot_be_asked_of_a_scenario(
    two_gpus: Path, asked: dict[str, Any], message: str
) -> None:
    assert message in error_of(two_gpus, **asked)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Given(), "which device? --hardware, one of a100-80, cpu-2-cores"),
        (Given(hardware="l40s"), "device: cpu, but l40s is a gpu"),
        (Given(profile=PROFILE), "what do requests ask? --preset, one of random-mm"),
        (Given(model="gpt", hardware="l40s"), "model 'gpt': known are llava-v1.6-34b"),
    ],
)
def test_what_a_deployment_file_does_not_say_is_asked_for(given: Given, message: str) -> None:
    assert message in error_of(DEPLOYMENT, given=given)


def test_a_model_that_costs_do_not_know_is_refused(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump({"model": str(model)}))
    found = error_of(path, given=Given(hardware="cpu-2-cores"))
    assert "(LlavaForConditionalGeneration): what it costs is not known; known are llava" in found
    assert "docs/costs.md" in found


def test_arrivals_that_have_no_rate_are_refused(tmp_path: Path) -> None:
    times = tmp_path / "times.txt"
    times.write_text("0\n1\n2\n")
    load = {"arrivals": "trace", "trace": str(times), "rate_per_s": None, "num_requests": 3}
    assert "give rate_per_s" in error_of(write(tmp_path / "trace.yaml", workload=load))
