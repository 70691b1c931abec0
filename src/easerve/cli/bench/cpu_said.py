"""What the numbers of ``easerve bench cpu`` say, in sentences."""

from collections.abc import Iterator, Mapping
from typing import Any

from easerve.cli.bench.cpu_alone import QUIET_CORES
from easerve.cli.bench.cpu_rows import ALONE, IN_RUN

PASS, ALL = "passthrough", "all"
BEST = "vLLM"
"""Whichever of its systems answers most of a mix."""
MECHANISMS = ("When", "Where", "How")
SAME = 0.03
"""Ratios that are nearer to each other are said to be the same."""
Result = dict[str, Any]


def middle(result: Result) -> Result:
    """The mix of which details are shown."""
    mixes: list[Result] = result["mixes"]
    return mixes[len(mixes) // 2]


def base_of(mix: Result, against: str) -> str:
    """The system that others are compared with."""
    return str(mix["best_vllm"] if against == BEST else against)


def disturbed(result: Result) -> str:
    """A warning when other processes took part of the cores, else nothing."""
    others = [run["others_cores"] for mix in result["mixes"] for run in mix["systems"].values()]
    others.append(result["stages"]["others_cores"])
    if max(others) <= QUIET_CORES:
        return ""
    return (
        f"Other processes used up to {max(others):.2f} of {result['num_cores']} cores meanwhile: "
        "these figures are not those of a quiet machine."
    )


def conclusions(result: Result) -> Iterator[str]:
    yield _against_passthrough(result)
    yield _alone(result)
    yield _as_allowed(result)
    yield _against_vllm(result)
    yield _why(result)


def _against_passthrough(result: Result) -> str:
    ratios = _ratios(result, PASS, ALL)
    most = max(ratios, key=lambda name: ratios[name])
    return (
        f"All mechanisms together answer {_spread(ratios.values())} times as many requests as "
        f"passthrough, most with mix {most}. The stages allow "
        f"{_spread(_allowed(result, PASS, ALL).values())}."
    )


def _alone(result: Result) -> str:
    parts = [f"{name} {_spread(_ratios(result, PASS, name).values())}" for name in MECHANISMS]
    best = {
        label: max((*MECHANISMS, ALL), key=lambda name: _ratios(result, PASS, name)[label])
        for label in _ratios(result, PASS, ALL)
    }
    wins = {
        name: [label for label, win in best.items() if win == name] for name in (*MECHANISMS, ALL)
    }
    won = "; ".join(f"{name} at {', '.join(labels)}" for name, labels in wins.items() if labels)
    text = f"Each alone: {', '.join(parts)}. Best of all variants: {won}."
    return text + _no_room(result)


def _no_room(result: Result) -> str:
    """Why Where wins nothing, if it does not."""
    where = _ratios(result, PASS, "Where")
    if max(where.values()) > 1 + SAME:
        return ""
    mix = middle(result)
    steps, costs = (
        [_prefill(mix["systems"][name], what) for name in (PASS, "Where")]
        for what in ("steps", "cost")
    )
    return (
        " Where and How win nothing here: they are for what an encoder's device has left over, and "
        f"these cores are everybody's. With mix {_label(mix)} a request's prefill takes "
        f"{steps[1]:.2f} instead of {steps[0]:.2f} steps on two engines, as fewer requests share "
        f"one, and {_ms(costs[1])} instead of {_ms(costs[0])}."
    )


def _prefill(run: Result, what: str) -> float:
    if what == "steps":
        return float(run["sizes"]["steps"]["prefill"])
    used = run["by_process"]
    return float(used.get("prefill", 0.0) + used.get("prefill core", 0.0))


def _as_allowed(result: Result) -> str:
    """How often stage times explain what was measured."""
    ours = (PASS, *MECHANISMS, ALL)
    found = [
        mix["ratios"][base_of(mix, against)][name]
        for mix in result["mixes"]
        for against in (PASS, BEST)
        for name in ours
        if name != against
    ]
    in_run, alone = (sum(each[by]["as_allowed"] for each in found) for by in (IN_RUN, ALONE))
    return (
        f"{in_run} of {len(found)} ratios to passthrough and to vLLM are within 10 % of what the "
        f"stage times in these runs allow, {alone} of what stages alone allow: there, nobody takes "
        "caches or cores from them."
    )


def _against_vllm(result: Result) -> str:
    names = dict.fromkeys(mix["best_vllm"] for mix in result["mixes"])
    best = " or ".join(names)
    ratios = _ratios(result, BEST, ALL)
    wins = [label for label, ratio in ratios.items() if ratio < 1 - SAME]
    loses = [label for label, ratio in ratios.items() if ratio > 1 + SAME]
    if not wins:
        return f"EAServe answers {_spread(ratios.values())} times as many requests as {best}."
    whole = "on every mix" if len(wins) == len(ratios) else f"with {', '.join(wins)}"
    text = (
        f"Aggregated vLLM ({best}) answers more than EAServe {whole}: EAServe answers "
        f"{_spread(ratios.values())} times as many."
    )
    return text + (f" EAServe answers more with {', '.join(loses)}." if loses else "")


def _why(result: Result) -> str:
    """What a request costs more than on an engine that does all."""
    mix = middle(result)
    ours, theirs = (mix["systems"][name]["by_process"] for name in (ALL, mix["best_vllm"]))
    if sum(ours.values()) <= sum(theirs.values()):
        return ""
    servers = sum(ours.get(name, 0.0) for name in ("encode", "prefill", "decode"))
    cores = sum(ours.get(f"{name} core", 0.0) for name in ("encode", "prefill", "decode"))
    router = ours.get("router", 0.0) + ours.get("preparation", 0.0)
    return (
        f"Why: with mix {_label(mix)} a request costs {_ms(sum(ours.values()))} of CPU time "
        f"instead of {_ms(sum(theirs.values()))}. The model is the same, but in three or four "
        f"engines: steps and transfers cost {_ms(cores)} instead of "
        f"{_ms(theirs.get('vLLM core', 0.0))}, as each engine has steps of its own with fewer "
        "sequences in them, embeddings and the KV cache go from process to process, and each "
        f"step has a fixed price that this tiny model does not outweigh; servers cost "
        f"{_ms(servers)} instead of {_ms(theirs.get('vLLM', 0.0))}, as each request is an HTTP "
        f"request to each of them, and pictures are read twice, to render and to encode; router "
        f"and preparation add {_ms(router)}. On {result['num_cores']} cores that all share, no "
        "stage gets a device of its own, which is what they are separated for."
    )


def _ratios(result: Result, against: str, name: str) -> dict[str, float]:
    return {
        _label(mix): mix["ratios"][base_of(mix, against)][name]["measured"]
        for mix in result["mixes"]
    }


def _allowed(result: Result, against: str, name: str) -> dict[str, float]:
    """By stage times in the runs."""
    return {
        _label(mix): mix["ratios"][base_of(mix, against)][name][IN_RUN]["allowed"]
        for mix in result["mixes"]
    }


def _label(mix: Mapping[str, Any]) -> str:
    return f"{mix['num_images']} x {mix['num_tokens']}"


def _spread(values: Any) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
