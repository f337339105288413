"""Published instances, and small ones by hand."""

from pathlib import Path

from dovetail.instances import instance_from

INSTANCES = Path(__file__).parents[1] / "data" / "instances"


def node(ident, cpu=10.0, acc=1.0, **fields):
    return {"id": ident, "cpuLatency": cpu, "fpgaLatency": acc, "supportedOnFpga": 1, **fields}


def edge(source, target, cost=0.0):
    return {"sourceId": source, "destId": target, "cost": cost}


def file_of(nodes, edges, *, accelerators=2, cpus=1, size=100.0):
    return {
        "maxSizePerFPGA": size, "maxFPGAs": accelerators, "maxCPUs": cpus,
        "nodes": nodes, "edges": edges,
    }  # fmt: skip


def instance_of(nodes, edges, **machine):
    """An instance of `node`s and `edge`s."""
    return instance_from(file_of(nodes, edges, **machine), "by-hand.json")


def spread(instance, device_of):
    """[ops] a placement by names: {node name or id: device name}; sources are left at 0."""
    graph, machine = instance.graph, instance.machine
    placement = [0] * len(graph)
    for name, device in device_of.items():
        known = name if name in graph.index else f"#{name}"
        placement[graph.index[known]] = machine.device_index(device)
    return placement
