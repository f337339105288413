"""Draws plans and results as terminal tables, web pages and traces."""

from dovetail.reports.charts import device_colours
from dovetail.reports.limits import StepLimits, find_limits
from dovetail.reports.page import PlanReport, write_html
from dovetail.reports.tables import (
    gpus_table,
    graph_summary,
    limits_table,
    machine_table,
    network_table,
    networks_table,
    phases_table,
    plan_table,
    presets_table,
    run_table,
    schedules_table,
)
from dovetail.reports.trace import chrome_trace

__all__ = [
    "PlanReport",
    "StepLimits",
    "chrome_trace",
    "device_colours",
    "find_limits",
    "gpus_table",
    "graph_summary",
    "limits_table",
    "machine_table",
    "network_table",
    "networks_table",
    "phases_table",
    "plan_table",
    "presets_table",
    "run_table",
    "schedules_table",
    "write_html",
]
