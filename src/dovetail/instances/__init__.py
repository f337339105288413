"""Published placement instances: a graph, its machine and its costs in one JSON file.

    {"maxSizePerFPGA": bytes, "maxFPGAs": k, "maxCPUs": l,
     "nodes": [{"id", "name", "supportedOnFpga", "cpuLatency", "fpgaLatency", "isBackwardNode",
                "colorClass", "size"}, ...],
     "edges": [{"sourceId", "destId", "cost"}, ...]}

Latencies and costs are milliseconds; `cost` moves the source's whole output between an accelerator
and host memory, and is paid once per (source, device). `size` is bytes on an accelerator.

Paper: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020, https://arxiv.org/abs/2006.16423, sections 3 and 4.

As records: every accelerator and every CPU hangs on a host that runs nothing, the CPUs by links
that cost nothing. A node's `size` is a parameter that it alone reads, its output occupies nothing
and `Costs.sent_bytes` says what moving it costs; nodes of one colour share a colocation id.
"""

from dovetail.instances.reading import instance_from, is_instance, load_instance
from dovetail.instances.records import Instance
from dovetail.instances.writing import instance_to_dict, save_instance

__all__ = [
    "Instance",
    "instance_from",
    "instance_to_dict",
    "is_instance",
    "load_instance",
    "save_instance",
]
