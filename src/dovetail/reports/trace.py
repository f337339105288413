"""Chrome-trace JSON of a timeline, for Perfetto and chrome://tracing.

Format: "Trace Event Format", Google, 2016: complete events "X" with `ts` and `dur` in
microseconds, and metadata events "M" that name processes and threads.
"""

from typing import Any

from dovetail.graph import Graph
from dovetail.timeline import Timeline

DEVICES, CHANNELS = 0, 1


def chrome_trace(timeline: Timeline, graph: Graph) -> dict[str, Any]:
    """The trace as one object for `json.dump`: process 0 holds the devices, 1 the channels."""
    events: list[dict[str, Any]] = []
    for process, (title, rows) in enumerate(
        (("devices", timeline.devices), ("channels", timeline.channels))
    ):
        events.append(_named("process_name", process, 0, title))
        events += [_named("thread_name", process, row, name) for row, name in enumerate(rows)]
    for op, device, start, end in zip(
        timeline.ops.tolist(),
        timeline.op_devices.tolist(),
        timeline.op_starts.tolist(),
        timeline.op_ends.tolist(),
        strict=True,
    ):
        arguments = {"kind": graph.kinds[op], "module": graph.modules[op]}
        events.append(_complete(graph.names[op], DEVICES, device, (start, end), arguments))
    for i, op in enumerate(timeline.transfer_ops.tolist()):
        tensor = int(timeline.transfer_tensors[i])
        size = int(graph.tensor_bytes[tensor]) if tensor >= 0 else 0
        span = (float(timeline.transfer_starts[i]), float(timeline.transfer_ends[i]))
        channel = int(timeline.transfer_channels[i])
        arguments = {"bytes": size, "tensor": tensor}
        events.append(_complete(graph.names[op], CHANNELS, channel, span, arguments))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(
    name: str, process: int, thread: int, span: tuple[float, float], arguments: dict[str, Any]
) -> dict[str, Any]:
    start, end = span
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": arguments}
