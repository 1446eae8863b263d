"""Labels, queries and variables that panels share. `$run`, `$host`, `$role`, `$gpu` are the dashboards'
variables.

Metric names are as Prometheus shows those of otel_dflash/semconv.py: ``dflash.worker.time`` in s is
dflash_worker_time_seconds_total.
"""

from __future__ import annotations

from typing import Final

RUN: Final = 'dflash_run_id=~"$run", host_name=~"$host"'
WORKER: Final = f'{RUN}, dflash_worker_role=~"$role"'
GPU: Final = f'{RUN}, dflash_gpu_index!="", dflash_gpu_index=~"$gpu"'

TIME: Final = "dflash_worker_time_seconds_total"
STEPS: Final = "dflash_worker_batches_total"
TOKENS: Final = "dflash_worker_tokens_total"
TRAINING_TOKENS: Final = "dflash_training_tokens_total"
PHASE: Final = "dflash_phase_duration_seconds"
STEP: Final = "dflash_step_duration_seconds"

ROLE: Final = "dflash_worker_role"
ROLE_ID: Final = "dflash_worker_role, dflash_worker_id"
ROLE_PHASE: Final = "dflash_worker_role, dflash_phase"
HOST_GPU: Final = "host_name, dflash_gpu_index"
RUN_HOST: Final = "dflash_run_id, host_name"
WORKER_LEGEND: Final = "{{dflash_worker_role}} {{dflash_worker_id}}"
PHASE_LEGEND: Final = "{{dflash_worker_role}} {{dflash_phase}}"
GPU_LEGEND: Final = "{{host_name}} GPU {{dflash_gpu_index}}"
RUN_LEGEND: Final = "{{dflash_run_id}} {{host_name}}"

BUSY: Final = 'dflash_worker_state="busy"'
FAILED: Final = 'error_type!=""'

INTERVAL: Final = "$__rate_interval"
SHOWN: Final = "$__range"

# Name, label, query.
VARIABLES: Final = (
    ("run", "Run", "label_values(dflash_telemetry_cpu_time_seconds_total, dflash_run_id)"),
    (
        "host",
        "Host",
        'label_values(dflash_telemetry_cpu_time_seconds_total{dflash_run_id=~"$run"}, host_name)',
    ),
)
ROLE_VARIABLE: Final = ("role", "Worker role", f"label_values({STEPS}{{{RUN}}}, dflash_worker_role)")
GPU_VARIABLE: Final = (
    "gpu",
    "GPU",
    f'label_values({STEPS}{{{RUN}, dflash_gpu_index!=""}}, dflash_gpu_index)',
)


def rate(metric: str, by: str, *matchers: str, base: str = WORKER, interval: str = INTERVAL) -> str:
    """Return the rate of a counter or histogram, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{{', '.join((base, *matchers))}}}[{interval}]))"


def increase(metric: str, by: str, base: str = WORKER) -> str:
    """Return by how much a counter grew in all the time that is shown, summed by labels."""
    return f"sum by ({by}) (increase({metric}{{{base}}}[{SHOWN}]))"


def newest(metric: str, by: str, base: str = WORKER) -> str:
    """Return the largest of a gauge, by labels."""
    return f"max by ({by}) ({metric}{{{base}}})"


def quantile(share: float, metric: str, by: str, *matchers: str, base: str = WORKER) -> str:
    """Return a quantile of a native histogram."""
    return f"histogram_quantile({share:g}, {rate(metric, by, *matchers, base=base)})"


def states(by: str, base: str = WORKER) -> str:
    """Return each state's share of the time of the workers that `by` puts together."""
    return (
        f"{rate(TIME, f'{by}, dflash_worker_state', base=base)} / ignoring (dflash_worker_state) group_left "
        f"() {rate(TIME, by, base=base)}"
    )


def waiting(by: str, base: str = WORKER) -> str:
    """Return the share of waiting in all the time that is shown."""
    waits = rate(
        TIME, by, 'dflash_worker_state=~"starved|backpressured|lock_wait"', base=base, interval=SHOWN
    )
    return f"{waits} / {rate(TIME, by, base=base, interval=SHOWN)}"


def phase_shares(by: str, base: str = WORKER) -> str:
    """Return each phase's share of the time of the workers that `by` puts together, nested phases
    included."""
    spent = f"histogram_sum({rate(PHASE, f'{by}, dflash_phase', base=base)})"
    return f"{spent} / on ({by}) group_left () {rate(TIME, by, base=base)}"
