"""How a panel, a row and a dashboard are made: `grafana-foundation-sdk` behind a handful of plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

# The units that panels here may have, as Grafana names them.
SECONDS: Final = "s"
SHARE: Final = "percentunit"  # of 1
COUNT: Final = "short"
PER_SECOND: Final = "cps"
RATIO: Final = "none"
BYTES: Final = "bytes"

# What several panels say.
IDLE_LIMITS: Final = (0.10, 0.25)  # shares of a worker's time
LIMITS_TEXT: Final = f"Orange from {100 * IDLE_LIMITS[0]:.0f} %, red from {100 * IDLE_LIMITS[1]:.0f} %."
STATES_TEXT: Final = (
    "busy: in a phase that works. starved: waiting for input (queue_get). backpressured: waiting for "
    "room downstream (queue_put). "
    "lock_wait: waiting for a lock. other: in no phase. uncaptured: phases were not captured "
    "(otel-dflash detail). They sum to the workers' wall time. A phase that is still open counts, too."
)
LAUNCH_TEXT: Final = (
    "Host time: around asynchronous GPU work it is the time to launch it; the GPU's own shows where the "
    "host next waits for it."
)

DATASOURCE: Final = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
_COLOURS: Final = ("green", "orange", "red")
_STATE_COLOURS: Final = {
    "busy": "green",
    "starved": "red",
    "backpressured": "orange",
    "lock_wait": "purple",
    "other": "gray",
    "uncaptured": "white",
}
_Panel = timeseries.Panel | bargauge.Panel | stat.Panel | table.Panel


@dataclass(frozen=True)
class Query:
    """One PromQL expression, and what its series are called."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel. Series over time, or with `kind` bars, stat or table the newest value of each."""

    title: str
    unit: str
    reads: str
    """How to read it: what is shown, what is good, where to look next."""
    queries: tuple[Query, ...]
    kind: str = "lines"
    width: int = 12
    """Of 24 columns."""
    limits: tuple[float, ...] = ()
    """From where on it is orange, and red."""
    repeat: str = ""
    """A variable: one panel for each of its values."""


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: rows of panels, with the variables they are filtered by."""

    uid: str
    title: str
    reads: str
    variables: tuple[tuple[str, str, str], ...]
    """Name, label and query of each, after the data source. The first one has one value, the newest run; the
    others all of theirs."""
    rows: Mapping[str, tuple[Panel, ...]]

    def build(self) -> model.Dashboard:
        """Return what Grafana takes as JSON."""
        built = (
            dashboard.Dashboard(self.title)
            .uid(self.uid)
            .description(self.reads)
            .tags(["otel-dflash"])
            .time("now-1h", "now")
            .refresh("30s")
            .timezone("browser")
            .tooltip(model.DashboardCursorSync.CROSSHAIR)
            .link(
                dashboard.DashboardLink("otel-dflash")
                .type(model.DashboardLinkType.DASHBOARDS)
                .tags(["otel-dflash"])
                .as_dropdown(False)
                .keep_time(True)
                .include_vars(True)
            )
            .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        )
        for position, (name, label, query) in enumerate(self.variables):
            built = built.with_variable(_variable(name, label, query, all_at_once=position > 0))
        number = 0
        for title, panels in self.rows.items():
            built = built.with_row(dashboard.Row(title))
            for panel in panels:
                number += 1
                built = built.with_panel(_panel(panel).id(number))
        return built.build()


def _variable(name: str, label: str, query: str, all_at_once: bool) -> dashboard.QueryVariable:
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": f"variable-{name}"})
    )
    variable = variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    if not all_at_once:
        return variable.sort(
            model.VariableSort.ALPHABETICAL_DESC
        )  # a run's name begins with its time, unless the user gave another
    chosen = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    return (
        variable.sort(model.VariableSort.NUMERICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(chosen)
    )


def _panel(panel: Panel) -> _Panel:
    made = _KINDS[panel.kind](panel)
    made = (
        made.title(panel.title)
        .description(panel.reads)
        .unit(panel.unit)
        .datasource(DATASOURCE)
        .span(panel.width)
        .height(8)
    )
    for position, query in enumerate(panel.queries):
        made = made.with_target(_target(panel.kind, query, chr(ord("A") + position)))
    if panel.unit == SHARE:
        made = made.min(0)
    steps = [
        model.Threshold(value, colour) for value, colour in zip((None, *panel.limits), _COLOURS, strict=False)
    ]
    made = made.thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.repeat:
        made = made.repeat(panel.repeat).repeat_direction("h").max_per_row(4)
    return made


def _target(kind: str, query: Query, letter: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter)
    if kind in ("lines", "stack"):
        return target.range().exemplar("histogram_" in query.expr)
    target = target.instant()
    return target.format(PromQueryFormat.TABLE) if kind == "table" else target


def _lines(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).display_mode(common_model.LegendDisplayMode.TABLE)
    legend = legend.placement(common_model.LegendPlacement.RIGHT).calcs(["mean", "max"])
    tooltip = (
        common.VizTooltipOptions()
        .mode(common_model.TooltipDisplayMode.MULTI)
        .sort(common_model.SortOrder.DESCENDING)
    )
    made = (
        timeseries.Panel()
        .legend(legend)
        .tooltip(tooltip)
        .fill_opacity(0)
        .show_points(common_model.VisibilityMode.AUTO)
    )
    if panel.limits:
        made = made.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_model.GraphThresholdsStyleMode.DASHED)
        )
    return made


def _stack(panel: Panel) -> timeseries.Panel:
    stacking = common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A")
    made = _lines(panel).stacking(stacking).fill_opacity(60).line_width(0).max(1)
    for state, colour in _STATE_COLOURS.items():
        made = made.override_by_name(
            state, [model.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})]
        )
    return made


def _bars(panel: Panel) -> bargauge.Panel:
    bars = (
        bargauge.Panel()
        .orientation(common_model.VizOrientation.HORIZONTAL)
        .display_mode(common_model.BarGaugeDisplayMode.BASIC)
    )
    return bars.reduce_options(_newest())


def _stat(panel: Panel) -> stat.Panel:
    return stat.Panel().reduce_options(_newest()).graph_mode(common_model.BigValueGraphMode.NONE)


def _table(panel: Panel) -> table.Panel:
    return table.Panel().with_transformation(
        model.DataTransformerConfig("organize", options={"excludeByName": {"Time": True}})
    )


def _newest() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


_KINDS: Final[dict[str, Callable[[Panel], _Panel]]] = {
    "lines": _lines,
    "stack": _stack,
    "bars": _bars,
    "stat": _stat,
    "table": _table,
}
