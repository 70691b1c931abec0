"""Stages of a device on which everything is in round numbers (ms), for tests."""

from easerve.costs.stages import (
    DecodeSteps,
    EncodeCalls,
    Load,
    PrefillCalls,
    Pulls,
    Pushes,
    Renders,
    Stages,
)

MS = 1e-3


def made() -> Stages:
    """Encode 2 + 1 an item, prefill 3 + 0.01 a token, a step 1 + 0.1 a sequence + 0.001 a token.

    API servers: encode 4 + 0.5 an item, prefill 2, decode 1 an answer, 0.2 + 0.05 a token a step.
    Router and client: 3 and 0.5 a request, 0.04 and 0.02 a token.
    """
    return Stages(
        render=Renders(wall_s=(3 * MS,), api_s=2.5 * MS),
        encode=tuple(
            EncodeCalls(
                batch=batch,
                wall_s=(9 * MS,),
                engine_s=(2 + batch) * MS,
                api_s=(4 + 0.5 * batch) * MS,
            )
            for batch in (1, 2, 4, 8)
        ),
        prefill=tuple(
            PrefillCalls(
                tokens=tokens,
                wall_s=(6 * MS,),
                engine_s=(3 + 0.01 * tokens) * MS,
                api_s=2 * MS,
            )
            for tokens in (16, 64, 512)
        ),
        decode=tuple(
            DecodeSteps(
                sequences=sequences,
                context=context,
                step_s=(2 * MS,),
                engine_s=(1 + sequences * (0.1 + 0.001 * context)) * MS,
                api_s=(0.2 + 0.05 * sequences) * MS,
            )
            for sequences in (1, 2, 4, 8)
            for context in (64, 512)
        ),
        pulls=(
            Pulls(
                tokens=64,
                wall_s=(9 * MS,),
                pull_s=2 * MS,
                engine_s=(0.5 + 2 + 1.164) * MS,
                api_s=1.25 * MS,
                handover_s=0.7 * MS,
            ),
            Pulls(
                tokens=512,
                wall_s=(9 * MS,),
                pull_s=3 * MS,
                engine_s=5 * MS,
                api_s=1.25 * MS,
                handover_s=0.8 * MS,
            ),
        ),
        pushes=(
            Pushes(items=1, tokens=25, usable_s=(0.4 * MS, 0.4 * MS, 9 * MS)),
            Pushes(items=16, tokens=400, usable_s=(0.7 * MS,)),
        ),
        loads=tuple(
            Load(
                rate_per_s=10,
                requests=20,
                tokens=tokens,
                wall_s=2,
                cpu_s={
                    "router": 20 * (3 + 0.04 * tokens) * MS + 2 * 0.005,
                    "preparation": 20 * 0.6 * MS,
                    "client": 20 * (0.5 + 0.02 * tokens) * MS,
                },
            )
            for tokens in (2, 32)
        ),
        idle_cores={"router": 0.005, "encode-0 core": 0.02},
        crowding=0.25,
    )
