"""Every name this product puts on a span, a metric or a resource, with instrument and unit.

Names of our own are under ``dflash.``; the rest are OpenTelemetry's (semantic conventions 1.44.0).
"""

from __future__ import annotations

from typing import Final

SCOPE_NAME: Final = "otel_dflash"
DEFAULT_SERVICE_NAME: Final = "dflash"

# What `otel-dflash doctor` sends
DOCTOR_SERVICE_NAME: Final = "dflash-doctor"
DOCTOR_SPAN: Final = "dflash.doctor"
DOCTOR_CANARY: Final = ("dflash.doctor.canary", "s", "Unix time of the newest canary.")

# Resource
# <OTEL_SERVICE_NAME or dflash>-<role> on spans, without the role on metrics
SERVICE_NAME: Final = "service.name"
# on spans <OTEL_SERVICE_NAME or dflash>, unless the user sets another
SERVICE_NAMESPACE: Final = "service.namespace"
SERVICE_INSTANCE_ID: Final = "service.instance.id"  # <run>-<host>-<pid>
HOST_NAME: Final = "host.name"
PROCESS_PID: Final = "process.pid"
RUN_ID: Final = "dflash.run.id"

# Spans: "<role>.step" and "<role>.<phase>"
WORKER_ROLE: Final = "dflash.worker.role"
WORKER_ID: Final = "dflash.worker.id"
GPU_INDEX: Final = "dflash.gpu.index"
THREAD_ID: Final = "thread.id"
THREAD_NAME: Final = "thread.name"
CLOCK_DOMAIN: Final = "dflash.clock.domain"
CLOCK_DOMAIN_HOST: Final = "host"  # launch time of asynchronous work, not device time
STEP: Final = "dflash.step"  # the number the user gives the step
BATCH_ID: Final = "dflash.batch.id"
BATCH_TOKENS: Final = "dflash.batch.tokens"
BATCH_LOSS_TOKENS: Final = "dflash.batch.loss_tokens"
BATCH_ITEM_COUNT: Final = "dflash.batch.item.count"  # items the step consumed
BUCKET_ID: Final = "dflash.bucket.id"
# true: still open when its process ended, or its end was dropped
SPAN_TRUNCATED: Final = "dflash.span.truncated"
ERROR_TYPE: Final = "error.type"
QUEUE_NAME: Final = "dflash.queue.name"
QUEUE_RESIDENCE: Final = "dflash.queue.residence"  # s, from put to get
QUEUE_ITEM_EVENT: Final = "dflash.queue.item"  # one event per consumed item on the span of the get
STATE: Final = "dflash.worker.state"
# false, on a link and on its event: the trace that it leads to had not been sent at that time
TRACE_SAMPLED: Final = "dflash.trace.sampled"
# on a step: how many further traces hold phases for which its own trace had no room
TRACE_CONTINUED: Final = "dflash.trace.continued"
# on links between the parts of a step; links to the producers of items have none
LINK_KIND: Final = "dflash.link.kind"
LINK_CONTINUES: Final = "continues"  # from a span to its parent, if that is in another trace
LINK_CONTINUED: Final = "continued"  # from a step to the first of its spans in a further trace
STEP_SPAN_SUFFIX: Final = "step"

# step.set() keywords with a name of their own; any other key without a dot is sent as "dflash.<key>".
ATTRIBUTE_NAMES: Final = {"batch_id": BATCH_ID}
ATTRIBUTE_PREFIX: Final = "dflash."

# Metrics: name, unit, description. Cumulative; histograms are exponential at scale 6.
PHASE_DURATION: Final = ("dflash.phase.duration", "s", "Host time of one phase.")
STEP_DURATION: Final = ("dflash.step.duration", "s", "Host time of one step of a worker.")
WORKER_TIME: Final = (
    "dflash.worker.time",
    "s",
    "Wall time of a worker by state; the states sum to the whole.",
)
WORKER_OPEN_AGE: Final = (
    "dflash.worker.open_span.age",
    "s",
    "Age of the oldest phase that a worker has open, 0 if none is.",
)
WORKER_COUNT: Final = ("dflash.worker.count", "{worker}", "Workers of a process by role: running, or ended.")
WORKER_BATCHES: Final = ("dflash.worker.batches", "{batch}", "Steps a worker completed.")
WORKER_TOKENS: Final = ("dflash.worker.tokens", "{token}", "Tokens of the steps a worker completed.")
TRAINING_TOKENS: Final = (
    "dflash.training.tokens",
    "{token}",
    "Tokens of steps that say their loss tokens: all of them, and those.",
)
TELEMETRY_EVENTS: Final = ("dflash.telemetry.events", "{event}", "Records taken from the rings.")
TELEMETRY_EVENTS_DROPPED: Final = ("dflash.telemetry.events.dropped", "{event}", "Records lost, by reason.")
TELEMETRY_RING_UTILIZATION: Final = (
    "dflash.telemetry.ring.utilization",
    "1",
    "Largest fill of a ring at a drain.",
)
TELEMETRY_CPU_TIME: Final = ("dflash.telemetry.cpu.time", "s", "CPU time the telemetry itself used.")
TELEMETRY_OVERHEAD: Final = (
    "dflash.telemetry.overhead",
    "1",
    "Calibrated cost per record x records / wall time.",
)
TELEMETRY_LAG: Final = ("dflash.telemetry.lag", "s", "Age of the newest record a sink has delivered.")
TELEMETRY_CLOCK_OFFSET: Final = ("dflash.telemetry.clock.offset", "s", "Wall clock minus anchored time.")

PHASE: Final = "dflash.phase"
STATE_RUNNING: Final = "running"  # dflash.worker.state of dflash.worker.count
STATE_ENDED: Final = "ended"  # the worker was closed, or its process is gone
TOKEN_TYPE: Final = "dflash.token.type"
TOKEN_INPUT: Final = "input"
TOKEN_LOSS: Final = "loss"
DROP_REASON: Final = "dflash.telemetry.drop.reason"
COMPONENT: Final = "dflash.telemetry.component"
SINK: Final = "dflash.telemetry.sink"

# Reasons of dflash.telemetry.events.dropped that are found while folding; the rings' own are
# records.DROP_REASONS.
DROP_MALFORMED: Final = "malformed"
DROP_NO_RING: Final = "no_ring"  # steps whose worker got no ring; of no worker
DROP_NOT_RECORDED: Final = "not_recorded"  # taken from the ring, but not in the recording any more, or never
COMPONENT_AGENT: Final = "agent"
