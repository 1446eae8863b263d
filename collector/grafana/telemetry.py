"""The telemetry's own health."""

from __future__ import annotations

from typing import Final

from collector.grafana.panels import BYTES, COUNT, PER_SECOND, SECONDS, SHARE, Dashboard, Panel, Query
from collector.grafana.promql import (
    INTERVAL,
    ROLE_ID,
    ROLE_VARIABLE,
    RUN,
    RUN_HOST,
    RUN_LEGEND,
    VARIABLES,
    WORKER_LEGEND,
    increase,
    newest,
    rate,
)

TELEMETRY: Final = Dashboard(
    "dflash-telemetry",
    "DFlash telemetry's own health",
    (
        "Whether the numbers can be trusted: what was recorded, lost and late, what it costs, and whether "
        "the collector gets rid of it."
    ),
    (*VARIABLES, ROLE_VARIABLE),
    {
        "Is all of it here": (
            Panel(
                "Records lost, by reason",
                COUNT,
                "In the time shown. 0 is good. ring_full: the agent was away or too slow. "
                "not_recorded: the disk was full, or the "
                "recording's cap was reached. Each reason's remedy: otel-dflash summary.",
                (
                    Query(
                        increase("dflash_telemetry_events_dropped_total", "dflash_telemetry_drop_reason"),
                        "{{dflash_telemetry_drop_reason}}",
                    ),
                ),
                kind="stat",
                limits=(1, 1000),
            ),
            Panel(
                "Age of the newest point",
                SECONDS,
                "How long ago the agent last said anything here. Rising steadily: the run has ended, "
                "or its agent or its way to here has "
                "failed; the panel Workers of the pipeline tells which, as does the alert DflashAgentDown.",
                (
                    Query(
                        (
                            f"time() - max by ({RUN_HOST}) "
                            f"(timestamp(dflash_telemetry_cpu_time_seconds_total{{{RUN}}}))"
                        ),
                        RUN_LEGEND,
                    ),
                ),
                limits=(60, 120),
            ),
            Panel(
                "Records a second, by worker",
                PER_SECOND,
                "What the agent took from each worker's ring. It should follow the steps.",
                (Query(rate("dflash_telemetry_events_total", ROLE_ID), WORKER_LEGEND),),
            ),
            Panel(
                "Fill of the rings",
                SHARE,
                "How full a ring was when the agent came, ten times a second. Near 100 % records are "
                "about to be lost: give "
                "the agent a core, "
                "or set OTEL_DFLASH_RING_BYTES.",
                (Query(newest("dflash_telemetry_ring_utilization_ratio", ROLE_ID), WORKER_LEGEND),),
                limits=(0.5, 0.9),
            ),
            Panel(
                "Lag of the sinks",
                SECONDS,
                "Age of the newest record that was delivered. A few seconds are normal. Growing: the "
                "endpoint is slow, down or refuses; "
                "nothing is lost while the recording has room.",
                (
                    Query(
                        newest("dflash_telemetry_lag_seconds", f"{RUN_HOST}, dflash_telemetry_sink", RUN),
                        f"{RUN_LEGEND} {{{{dflash_telemetry_sink}}}}",
                    ),
                ),
                limits=(30, 60),
            ),
            Panel(
                "Offset of the wall clock",
                SECONDS,
                "Wall clock minus the time that was anchored when the run began. It moves when the "
                "host's clock is set or "
                "slewed; spans keep "
                "the anchored time, so spans of two hosts may be apart by the difference.",
                (Query(newest("dflash_telemetry_clock_offset_seconds", RUN_HOST, RUN), RUN_LEGEND),),
            ),
        ),
        "What it costs": (
            Panel(
                "Estimated cost in the trainer",
                SHARE,
                "Calibrated cost of a record x records / wall time of the worker, since it began. "
                "Above 1 % capture less: "
                "otel-dflash detail steps.",
                (Query(newest("dflash_telemetry_overhead_ratio", ROLE_ID), WORKER_LEGEND),),
                limits=(0.005, 0.01),
            ),
            Panel(
                "CPU of the agent",
                SHARE,
                (
                    "Of one core. The agent is a process of its own: it takes this from the host, not from "
                    "the trainer's interpreter."
                ),
                (Query(rate("dflash_telemetry_cpu_time_seconds_total", RUN_HOST, base=RUN), RUN_LEGEND),),
            ),
            Panel(
                "Series in Prometheus, by run",
                COUNT,
                "What a run costs Prometheus. Below 900 with 8 workers and 8 GPUs.",
                (Query(f'count by (dflash_run_id) ({{__name__=~"dflash_.+", {RUN}}})', "{{dflash_run_id}}"),),
                limits=(900, 2000),
            ),
        ),
        "The collectors": (
            Panel(
                "Fill of the queue",
                SHARE,
                "Bytes that wait to be sent, of those that fit. They are on disk and survive a "
                "restart. Growing: the backend "
                "is down, slow or "
                "refuses. Full: the collector refuses, and agents wait.",
                (
                    Query(
                        "otelcol_exporter_queue_size / otelcol_exporter_queue_capacity",
                        "{{exporter}} {{instance}}",
                    ),
                ),
                limits=(0.1, 0.5),
            ),
            Panel(
                "Bytes that wait",
                BYTES,
                (
                    "The same as a number. Not falling while nothing is sent: look at the collector's log "
                    "for the reason."
                ),
                (Query("otelcol_exporter_queue_size", "{{exporter}} {{instance}}"),),
            ),
            Panel(
                "Taken and sent",
                PER_SECOND,
                "Spans and metric points a second, all collectors together. Sent stays at zero while a "
                "backend is down, and "
                "catches up after it.",
                tuple(
                    Query(f"sum (rate({name}[{INTERVAL}]))", legend)
                    for name, legend in (
                        ("otelcol_receiver_accepted_spans_total", "spans taken"),
                        ("otelcol_exporter_sent_spans_total", "spans sent"),
                        ("otelcol_receiver_accepted_metric_points_total", "points taken"),
                        ("otelcol_exporter_sent_metric_points_total", "points sent"),
                    )
                ),
            ),
            Panel(
                "Refused",
                PER_SECOND,
                "What a collector did not take: out of memory, or its queue or disk is full. The agent "
                "tries again; nothing is "
                "lost. 0 is good.",
                tuple(
                    Query(
                        f"sum by (instance) (rate(otelcol_receiver_refused_{items}_total[{INTERVAL}]))",
                        f"{items} {{{{instance}}}}",
                    )
                    for items in ("spans", "metric_points")
                ),
            ),
            Panel(
                "Memory of a collector",
                BYTES,
                "Resident. It refuses data when its heap is above 80 % of OTELCOL_MEMORY_MIB.",
                (Query("otelcol_process_memory_rss_bytes", "{{instance}}"),),
            ),
            Panel(
                "CPU of a collector",
                SHARE,
                "Of one core. It follows the spans a second; the README has the cost of one.",
                (
                    Query(
                        f"sum by (instance) (rate(otelcol_process_cpu_seconds_total[{INTERVAL}]))",
                        "{{instance}}",
                    ),
                ),
            ),
        ),
    },
)
