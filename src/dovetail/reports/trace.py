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

    def describe(what: str, process: int, thread: int, arguments: dict[str, Any]) -> None:
        events.append({"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments})

    def happen(process: int, thread: int, op: int, span: Any, arguments: dict[str, Any]) -> None:
        start, end = map(float, span)
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        where = {"pid": process, "tid": thread}
        events.append({"ph": "X", "name": graph.names[op], **where, **times, "args": arguments})

    timelines = [("predicted", predicted), *([("measured", measured)] if measured else [])]
    for process, (name, timeline) in enumerate(timelines):
        describe("process_name", process, 0, {"name": name})
        describe("process_sort_index", process, 0, {"sort_index": process})
        for thread, label in enumerate([*timeline.devices, *timeline.channels]):
            # A device may be a channel as well. Then it has a thread of each kind, told apart by
            # name.
            text = label if thread < len(timeline.devices) else f"transfers on {label}"
            describe("thread_name", process, thread, {"name": text})
            describe("thread_sort_index", process, thread, {"sort_index": thread})
        spans = zip(timeline.op_starts, timeline.op_ends, strict=True)
        for op, device, span in zip(
            timeline.ops.tolist(), timeline.op_devices.tolist(), spans, strict=True
        ):
            of_op = {"kind": graph.kinds[op], "module": graph.modules[op]}
            happen(process, device, op, span, of_op)
        spans = zip(timeline.transfer_starts, timeline.transfer_ends, strict=True)
        for i, span in enumerate(spans):
            tensor = int(timeline.transfer_tensors[i])
            carried = {
                "bytes": int(graph.tensor_bytes[tensor]) if tensor >= 0 else 0,
                "tensor": tensor,
                "to": timeline.devices[int(timeline.transfer_destinations[i])],
            }
            thread = len(timeline.devices) + int(timeline.transfer_channels[i])
            happen(process, thread, int(timeline.transfer_ops[i]), span, carried)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
