"""Where the time of roles and workers goes."""

from __future__ import annotations

from typing import Final

from collector.grafana.panels import (
    COUNT,
    IDLE_LIMITS,
    LAUNCH_TEXT,
    LIMITS_TEXT,
    PER_SECOND,
    RATIO,
    SECONDS,
    SHARE,
    STATES_TEXT,
    Dashboard,
    Panel,
    Query,
)
from collector.grafana.promql import (
    BUSY,
    FAILED,
    PHASE,
    PHASE_LEGEND,
    ROLE,
    ROLE_ID,
    ROLE_PHASE,
    ROLE_VARIABLE,
    RUN,
    STEP,
    STEPS,
    TIME,
    TOKENS,
    TRAINING_TOKENS,
    VARIABLES,
    WORKER,
    WORKER_LEGEND,
    phase_shares,
    quantile,
    rate,
    states,
    waiting,
)

PIPELINE: Final = Dashboard(
    "dflash-pipeline",
    "DFlash pipeline",
    (
        "Where the time of each role and worker goes, how long its phases take, and whether the roles are "
        "in balance."
    ),
    (*VARIABLES, ROLE_VARIABLE),
    {
        "Where the time goes": (
            Panel(
                "$role: time by state",
                SHARE,
                (
                    f"The role's workers together. {STATES_TEXT} A role that mostly waits is not the "
                    "bottleneck: the one it waits for is."
                ),
                (Query(states(ROLE), "{{dflash_worker_state}}"),),
                kind="stack",
                width=24,
                repeat="role",
            ),
            Panel(
                "Waiting, by worker",
                SHARE,
                "Share of a worker's time spent starved, backpressured or waiting for locks, over the "
                f"time shown. {LIMITS_TEXT} One "
                "worker far above the others of its role has a problem of its own.",
                (Query(waiting(ROLE_ID), WORKER_LEGEND),),
                kind="bars",
                limits=IDLE_LIMITS,
            ),
            Panel(
                "Phases, share of the role's time",
                SHARE,
                (
                    "What the time goes into. A phase inside another is part of both, so they may sum to "
                    f"more than 100 %. {LAUNCH_TEXT}"
                ),
                (Query(phase_shares(ROLE), PHASE_LEGEND),),
            ),
        ),
        "How long it takes": (
            Panel(
                "Phases, p50",
                SECONDS,
                f"Half of them took less. {LAUNCH_TEXT} A dot is an exemplar: it leads to a trace.",
                (Query(quantile(0.5, PHASE, ROLE_PHASE), PHASE_LEGEND),),
            ),
            Panel(
                "Phases, p99",
                SECONDS,
                (
                    "One in a hundred took longer. Far above p50 it is a stall rather than the work. Exact "
                    f"to 1.1 %. {LAUNCH_TEXT}"
                ),
                (Query(quantile(0.99, PHASE, ROLE_PHASE), PHASE_LEGEND),),
            ),
            Panel(
                "Steps, p50 and p99",
                SECONDS,
                (
                    "One turn of a worker's loop, waits included: it takes as long as the slowest part of "
                    "the pipeline makes it."
                ),
                tuple(
                    Query(quantile(share, STEP, ROLE), f"{{{{dflash_worker_role}}}} p{100 * share:g}")
                    for share in (0.5, 0.99)
                ),
            ),
            Panel(
                "Waits at queues, p99",
                SECONDS,
                "A get waits for input, a put for room. With items in the queue a get takes "
                "microseconds; one of many milliseconds says "
                "that upstream is too slow, a long put that downstream is.",
                (Query(quantile(0.99, PHASE, ROLE_PHASE, 'dflash_phase=~".*(get|put)"'), PHASE_LEGEND),),
            ),
            Panel(
                "Phases that failed",
                PER_SECOND,
                (
                    "Phases left by an exception, by its type; a get that timed out is one. No data is "
                    "good. In Jaeger: error=true."
                ),
                (
                    Query(
                        f"histogram_count({rate(PHASE, f'{ROLE_ID}, dflash_phase, error_type', FAILED)})",
                        f"{WORKER_LEGEND} {{{{dflash_phase}}}}: {{{{error_type}}}}",
                    ),
                ),
                width=24,
            ),
        ),
        "Throughput and balance": (
            Panel(
                "Steps a second, by worker",
                PER_SECOND,
                (
                    "Steps that ended. Workers of one role should lie together; one far below is a "
                    "straggler, one at zero hangs or has ended."
                ),
                (Query(rate(STEPS, ROLE_ID), WORKER_LEGEND),),
            ),
            Panel(
                "Tokens a second, by role",
                PER_SECOND,
                "Tokens of the steps that ended, as step.set(tokens=...) said them.",
                (Query(rate(TOKENS, ROLE), "{{dflash_worker_role}}"),),
            ),
            Panel(
                "Tokens that count in the loss, by role",
                SHARE,
                "Of the tokens of steps that say both, by step.set(tokens=..., loss_tokens=...). A "
                "step in it is another mix of data, or a "
                "mask that went wrong: a quarter away from the two hours before raises "
                "DflashLossTokenShareJump.",
                (
                    Query(
                        " / ".join(
                            rate(TRAINING_TOKENS, ROLE, f'dflash_token_type="{kind}"')
                            for kind in ("loss", "input")
                        ),
                        "{{dflash_worker_role}}",
                    ),
                ),
            ),
            Panel(
                "Busy seconds a step, by worker",
                SECONDS,
                "What a step costs a worker without its waits, so a slow worker shows also where a "
                "queue hides it. One a quarter above the "
                f"others of its role for ten minutes raises DflashStraggler. {LAUNCH_TEXT}",
                (Query(f"{rate(TIME, ROLE_ID, BUSY)} / {rate(STEPS, ROLE_ID)}", WORKER_LEGEND),),
            ),
            Panel(
                "Target steps for one drafter step",
                RATIO,
                "Steady when the roles are in balance. Rising, the queue between them fills and "
                "targets will wait; falling, it empties and "
                "drafters will wait. Roles are as the product calls them, whatever role is chosen above.",
                (
                    Query(
                        " / ".join(
                            rate(STEPS, "dflash_run_id", f'dflash_worker_role="{role}"', base=RUN)
                            for role in ("target", "drafter")
                        ),
                        "{{dflash_run_id}}",
                    ),
                ),
            ),
            Panel(
                "Workers",
                COUNT,
                "How many run and how many have ended. Where all have ended the run is over.",
                (
                    Query(
                        f"sum by ({ROLE}, dflash_worker_state) (dflash_worker_count{{{WORKER}}})",
                        "{{dflash_worker_role}} {{dflash_worker_state}}",
                    ),
                ),
                kind="stat",
                width=12,
            ),
        ),
    },
)
