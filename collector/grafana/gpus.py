"""What the host knows of each GPU."""

from __future__ import annotations

from typing import Final

from collector.grafana.panels import (
    COUNT,
    IDLE_LIMITS,
    LAUNCH_TEXT,
    LIMITS_TEXT,
    PER_SECOND,
    SECONDS,
    SHARE,
    STATES_TEXT,
    Dashboard,
    Panel,
    Query,
)
from collector.grafana.promql import (
    GPU,
    GPU_LEGEND,
    GPU_VARIABLE,
    HOST_GPU,
    PHASE,
    ROLE_ID,
    RUN_HOST,
    STEPS,
    TOKENS,
    VARIABLES,
    WORKER_LEGEND,
    increase,
    phase_shares,
    quantile,
    rate,
    states,
    waiting,
)

GPUS: Final = Dashboard(
    "dflash-gpus",
    "DFlash GPUs",
    "What the host knows of each GPU: whether the workers that drive it feed it or wait. A GPU is here "
    "when its worker was made with "
    "telemetry.worker(role, index, gpu=...).",
    (*VARIABLES, GPU_VARIABLE),
    {
        "Why are GPUs idle": (
            Panel(
                "Idle for lack of work, by GPU",
                SHARE,
                "Share of the time shown in which the GPU's workers were starved, backpressured or "
                "waiting for locks. "
                f"{LIMITS_TEXT} It is a "
                "lower bound of idleness: a GPU may also idle while its host launches too slowly, and "
                "it works on for a moment while the "
                "host already waits.",
                (Query(waiting(HOST_GPU, GPU), GPU_LEGEND),),
                kind="bars",
                limits=IDLE_LIMITS,
            ),
            Panel(
                "Who drives which GPU",
                COUNT,
                "Workers by GPU, with their steps in the time shown. Several workers of one GPU share it.",
                (
                    Query(
                        increase(STEPS, f"{RUN_HOST}, dflash_gpu_index, {ROLE_ID}", GPU),
                        WORKER_LEGEND,
                    ),
                ),
                kind="table",
            ),
            Panel(
                "GPU $gpu: time by state",
                SHARE,
                f"The workers of GPUs of this index together; choose one host to see one GPU. {STATES_TEXT}",
                (Query(states("dflash_gpu_index", GPU), "{{dflash_worker_state}}"),),
                kind="stack",
                width=24,
                repeat="gpu",
            ),
        ),
        "What runs on them": (
            Panel(
                "Phases, share of the GPU's time",
                SHARE,
                f"What the time of the GPU's workers goes into. {LAUNCH_TEXT}",
                (Query(phase_shares(HOST_GPU, GPU), f"{GPU_LEGEND} {{{{dflash_phase}}}}"),),
            ),
            Panel(
                "Phases, p99",
                SECONDS,
                "The same phase should take as long on every GPU of a role; one that stands out has a "
                "slow GPU, host core or "
                f"link. {LAUNCH_TEXT}",
                (
                    Query(
                        quantile(0.99, PHASE, f"{HOST_GPU}, dflash_phase", base=GPU),
                        f"{GPU_LEGEND} {{{{dflash_phase}}}}",
                    ),
                ),
            ),
            Panel(
                "Steps a second",
                PER_SECOND,
                "Steps that the GPU's workers ended.",
                (Query(rate(STEPS, HOST_GPU, base=GPU), GPU_LEGEND),),
            ),
            Panel(
                "Tokens a second",
                PER_SECOND,
                "Tokens of those steps.",
                (Query(rate(TOKENS, HOST_GPU, base=GPU), GPU_LEGEND),),
            ),
        ),
    },
)
