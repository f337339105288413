"""Writes timelines as Chrome-trace JSON, for Perfetto and chrome://tracing.

Format: "Trace Event Format", Google, 2016: complete events "X" with `ts` and `dur` in
microseconds, and metadata events "M" that name and order processes and threads.
"""

from typing import Any

from dovetail.graph import Graph
from dovetail.timeline import Timeline


def chrome_trace(
    predicted: Timeline, graph: Graph, measured: Timeline | None = None
) -> dict[str, Any]:
    """The trace as one object for `json.dump`. The process "predicted", and below it "measured" if
    that is given, share one time axis. A process's threads are the devices, then the channels."""
    events: list[dict[str, Any]] = []
    timelines = [("predicted", predicted)]
    if measured is not None:
        timelines.append(("measured", measured))
    for process, (name, timeline) in enumerate(timelines):
        events += _process(process, name, timeline)
        events += _spans(process, timeline, graph)
        events += _transfers(process, timeline, graph)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(process: int, name: str, timeline: Timeline) -> list[dict[str, Any]]:
    events = [_metadata("process_name", process, 0, {"name": name})]
    events.append(_metadata("process_sort_index", process, 0, {"sort_index": process}))
    for thread, label in enumerate([*timeline.devices, *timeline.channels]):
        # A device may be a channel as well. Then it has a thread of each kind, told apart by name.
        text = label if thread < len(timeline.devices) else f"transfers on {label}"
        events.append(_metadata("thread_name", process, thread, {"name": text}))
        events.append(_metadata("thread_sort_index", process, thread, {"sort_index": thread}))
    return events


def _spans(process: int, timeline: Timeline, graph: Graph) -> list[dict[str, Any]]:
    rows = zip(
        timeline.ops.tolist(),
        timeline.op_devices.tolist(),
        timeline.op_starts.tolist(),
        timeline.op_ends.tolist(),
        strict=True,
    )
    return [
        _complete(
            graph.names[op],
            (process, device),
            (start, end),
            {"kind": graph.kinds[op], "module": graph.modules[op]},
        )
        for op, device, start, end in rows
    ]


def _transfers(process: int, timeline: Timeline, graph: Graph) -> list[dict[str, Any]]:
    events = []
    for i, op in enumerate(timeline.transfer_ops.tolist()):
        tensor = int(timeline.transfer_tensors[i])
        thread = len(timeline.devices) + int(timeline.transfer_channels[i])
        span = (float(timeline.transfer_starts[i]), float(timeline.transfer_ends[i]))
        arguments = {
            "bytes": int(graph.tensor_bytes[tensor]) if tensor >= 0 else 0,
            "tensor": tensor,
            "to": timeline.devices[int(timeline.transfer_destinations[i])],
        }
        events.append(_complete(graph.names[op], (process, thread), span, arguments))
    return events


def _metadata(what: str, process: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}


def _complete(
    name: str, where: tuple[int, int], span: tuple[float, float], arguments: dict[str, Any]
) -> dict[str, Any]:
    (process, thread), (start, end) = where, span
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": arguments}
