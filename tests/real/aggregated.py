"""Plain vLLM engines, one per model, to compare with: ``FOLDER NAME=MODEL ...``.

Each listens on FOLDER/NAME.sock and is called NAME. They end when standard input ends.
"""

import asyncio
import sys
from pathlib import Path

from easerve.cluster.local import ForkServerSpec, LocalCluster, make_folders
from easerve.engines.vllm import launch
from easerve.engines.vllm.client import VllmEngine
from easerve.engines.vllm.launch import EngineSpec
from easerve.types import Stage, WorkerId

ENV = {
    "PYTHONPATH": str(launch.SITE),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
EXECUTOR = "easerve.engines.vllm.executor.SingleProcessExecutor"
ARGUMENTS = (
    *("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20)),
    *("--enforce-eager", "--distributed-executor-backend", EXECUTOR, "--max-num-seqs", "16"),
    *("--tool-call-parser", "hermes", "--enable-auto-tool-choice"),
)
OF_A_MODEL = {
    # Darker pictures than the model's processor makes: who ignores this answers otherwise.
    "next": ("--mm-processor-kwargs", '{"image_mean": [0.0, 0.0, 0.0]}'),
    # Every answer is parsed; this parser goes by words, which any tokenizer knows.
    "mistral3": ("--reasoning-parser", "granite"),
}


async def main(folder: Path, models: dict[str, str]) -> None:
    folders = make_folders(folder / "logs")
    specs = [
        EngineSpec(
            WorkerId(name),
            Stage.DECODE,
            (
                *("--model", model, "--served-model-name", name, "--uds", str(address)),
                *ARGUMENTS,
                *OF_A_MODEL.get(name, ()),
            ),
            ENV,
            address,
            folders.logs / f"{name}.log",
        )
        for name, model in models.items()
        for address in [folder / f"{name}.sock"]
    ]
    argv = launch.fork_server_command("LlavaForConditionalGeneration", "llava")
    cluster = LocalCluster(folders, specs, ForkServerSpec(argv, ENV))
    engines = {
        spec.worker_id: VllmEngine(spec.worker_id, spec.stage, spec.socket, spec.worker_id)
        for spec in specs
    }

    async def healthy(spec: EngineSpec) -> bool:
        return await engines[spec.worker_id].health() is True

    try:
        await cluster.start(healthy, 120)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        for engine in engines.values():
            await engine.close()
        await cluster.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), dict(each.split("=", 1) for each in sys.argv[2:])))
