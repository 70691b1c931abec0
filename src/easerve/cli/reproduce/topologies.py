"""Which engines each system has, and what it comes to at its best topology, as rows."""

from collections.abc import Sequence

from easerve.cli.reproduce.plan import UNTUNED, Study, sides
from easerve.cli.reproduce.tables import GOODPUT, TIER, Rows, headed
from easerve.cli.reproduce.text import Cell
from easerve.cli.reproduce.verdicts import Best, Results, topologies
from easerve.sim.config import (
    Batched,
    EaserveSystem,
    Encoders,
    HydraInferSystem,
    HydraNodes,
    LlmEngines,
    SystemConfig,
    VllmSystem,
)

THROUGHPUT = "throughput_per_s"
ASSUMED = "assumed"
AS_IT_IS = "as it is"


def engines(config: SystemConfig) -> str:
    """As in ``E 2 × TP1 + P 1 × TP2 + D 2 × TP2``; what one engine runs stands together."""
    if isinstance(config, VllmSystem):
        return f"EPD {_sizes(config)}"
    if isinstance(config, HydraInferSystem):
        return " + ".join(f"{kind.upper()} {_sizes(each)}" for kind, each in config.nodes.items())
    stages: dict[str, LlmEngines | Encoders | Batched] = {"E": config.encode}
    if config.prefill is None:
        stages["PD"] = config.decode
    else:
        stages |= {"P": config.prefill, "D": config.decode}
    text = " + ".join(f"{stage} {_sizes(each)}" for stage, each in stages.items())
    if isinstance(config, EaserveSystem) and config.local_prefill is not None:
        size = config.local_prefill.tensor_parallel_size
        local = f"{config.encode.replicas // size} × TP{size}"
        text += f", local P {local} on the GPUs of E, remote share {config.policy.remote_share:g}"
    return text


def _sizes(engines: LlmEngines | Encoders | Batched | HydraNodes) -> str:
    size = 1 if isinstance(engines, Encoders) else engines.tensor_parallel_size
    batch = f", batch {engines.max_batch}" if isinstance(engines, Batched) else ""
    return f"{engines.replicas} × TP{size}{batch}"


def configurations(studies: Sequence[Study]) -> Rows:
    """The engines of each system as it is, and where they come from."""
    rows: list[list[Cell]] = []
    for study in studies:
        for system in study.experiment.systems:
            origin = study.experiment.origins.get(system, ASSUMED)
            rows.append([study.name, system, engines(study.scenario.configs[system]), origin])
    return Rows(["scenario", "system", "engines", "from"], rows)


def best(results: Results, study: Study) -> Rows:
    """Each system with the most goodput over topologies and rates, and what it is there.

    Ours ÷ theirs: both at their best for the figure, beside the published ratio.
    """
    last = study.rates_per_s[-1]
    columns = ["system", "best of", "topology", "engines", "rate, req/s"]
    columns += [headed(GOODPUT), AS_IT_IS, headed(THROUGHPUT), headed("ttft_s.p99")]
    columns += [f"{TIER}: ours ÷ it", f"{TIER}: published"]
    columns += [f"throughput at {last:g}/s, req/s"]
    columns += [f"at {last:g}/s: ours ÷ it", f"at {last:g}/s: published"]
    rows = [_row(results, study, system, last) for system in study.experiment.systems]
    return Rows(columns, rows)


def _row(results: Results, study: Study, system: str, last: float) -> list[Cell]:
    num = len(topologies(study, system))
    found = results.best_topology(study, system, study.rates_per_s, GOODPUT)
    if found is None:
        return [system, num, *[None] * 11]
    there = results.at(study, system, found.topology, found.rate_per_s)
    plain = [results.at(study, system, "", rate).get(GOODPUT) for rate in study.rates_per_s]
    most = results.best_topology(study, system, [last], THROUGHPUT)
    return [
        system,
        num,
        found.topology or AS_IT_IS,
        engines(study.at(UNTUNED, found.topology).configs[system]),
        found.rate_per_s,
        found.value,
        max((each for each in plain if each is not None), default=None),
        there.get(THROUGHPUT),
        there.get("ttft_s.p99"),
        *_versus(results, study, system, study.rates_per_s, None, GOODPUT, found),
        most and most.value,
        *_versus(results, study, system, [last], last, THROUGHPUT, most),
    ]


def _versus(
    results: Results,
    study: Study,
    system: str,
    rates_per_s: Sequence[float],
    rate_per_s: float | None,
    metric: str,
    theirs: Best | None,
) -> list[Cell]:
    """Ours ÷ theirs, simulated and published."""
    ours = results.best_topology(study, study.scenario.system, rates_per_s, metric)
    if system == study.scenario.system:
        return [None, None]
    simulated = ours.value / theirs.value if ours and theirs and theirs.value else None
    published = published_ratio(study, system, metric, rate_per_s)
    return [None if each is None else f"{each:.3g} ×" for each in (simulated, published)]


def published_ratio(
    study: Study, system: str, metric: str, rate_per_s: float | None
) -> float | None:
    """Ours ÷ theirs: as published, or of the two published figures."""
    anchors = [
        each
        for each in study.scenario.anchors
        if (each.metric, each.rate_per_s) == (metric, rate_per_s)
    ]
    for each in anchors:
        if [side.system for side in sides(each)] == [study.scenario.system, system]:
            return each.published
    plain = {each.system: each.published for each in anchors if each.over is None}
    ours, theirs = plain.get(study.scenario.system), plain.get(system)
    return ours / theirs if ours and theirs else None


def goodputs(results: Results, study: Study) -> Rows:
    """Every topology at every rate."""
    columns = ["system", "topology", "engines"]
    columns += [f"{TIER} at {rate:g}/s, req/s" for rate in study.rates_per_s]
    columns.append(f"throughput at {study.rates_per_s[-1]:g}/s, req/s")
    rows: list[list[Cell]] = []
    for system in study.experiment.systems:
        for topology in topologies(study, system):
            runs = [results.at(study, system, topology, rate) for rate in study.rates_per_s]
            text = engines(study.at(UNTUNED, topology).configs[system])
            figures = [*(run.get(GOODPUT) for run in runs), runs[-1].get(THROUGHPUT)]
            rows.append([system, topology or AS_IT_IS, text, *figures])
    return Rows(columns, rows)
