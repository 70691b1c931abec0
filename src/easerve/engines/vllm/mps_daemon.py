"""The MPS daemon through which the two engines of a GPU compute at once, started before them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from easerve.config import ConfigError, Deployment
from easerve.engines.partition import mps
from easerve.engines.partition.facts import Facts
from easerve.engines.partition.ladder import Choice
from easerve.engines.vllm.launch import EngineSpec
from easerve.engines.vllm.topology import members
from easerve.types import Stage

STATIC, PRIORITY = "mps-static", "priority"
NEEDED_BY = ("green-context", STATIC, PRIORITY)


@dataclass(frozen=True, slots=True)
class MpsDaemon:
    """``argv``: of a daemon of our own, empty where one of ours runs already behind ``pipes``.

    ``env`` is its. ``by_priority``: prefill's kernels come after the encoder's. ``encode_sms``: of
    static partitions, None for half. ``uuids``: of the GPUs that engines name by number.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    pipes: Path
    logs: Path
    static: bool
    by_priority: bool
    encode_sms: int | None
    uuids: tuple[str, ...]

    def is_ready(self) -> bool:
        return mps.alive(self.pipes)

    def clients(self, specs: Sequence[EngineSpec]) -> list[EngineSpec]:
        """The engines with what makes those of a divided GPU the daemon's clients.

        Blocks while the daemon makes static partitions. Raises DriverError where it does not.
        """
        splits: dict[Path, mps.Split] = {}
        made = []
        for spec in specs:
            if spec.cell is None:
                made.append(spec)
                continue
            partition = None
            if self.static:
                if spec.cell not in splits:
                    uuid = self.uuids[spec.devices[0]]
                    splits[spec.cell] = mps.Control(self.pipes).split(uuid, self.encode_sms)
                split = splits[spec.cell]
                partition = split.encode if spec.stage is Stage.ENCODE else split.prefill
            below_normal = self.by_priority and spec.stage is not Stage.ENCODE
            client = mps.client_environment(
                {}, self.pipes, self.logs, partition, below_normal=below_normal
            )
            made.append(replace(spec, env={**spec.env, **client}))
        return made


def mps_daemon(
    deployment: Deployment, facts: Facts, choice: Choice, run_dir: Path, log_dir: Path
) -> MpsDaemon | None:
    """None where it takes none. One that runs already is used, but for static partitions."""
    if choice.rung not in NEEDED_BY:
        return None
    static = choice.rung == STATIC
    pipes, argv, env = Path(facts.mps.pipes), tuple[str, ...](), dict[str, str]()
    if static or not facts.mps.alive:
        pipes = run_dir / "mps"
        unset = [word for name in mps.HIDDEN for word in ("-u", name)]
        argv = ("env", *unset, *mps.command(static=static))
        env = mps.daemon_environment({}, pipes, log_dir)
    uuids = tuple(gpu.uuid for gpu in facts.gpus)
    encoders = (each for each in members(deployment) if each.stage is Stage.ENCODE)
    if (last := max(max(each.devices) for each in encoders)) >= len(uuids):
        raise ConfigError(f"GPU {last} of encode is not there: CUDA sees {len(uuids)}")
    by_priority = choice.rung == PRIORITY
    encode_sms = deployment.policy.encode_units
    return MpsDaemon(argv, env, pipes, log_dir, static, by_priority, encode_sms, uuids)
