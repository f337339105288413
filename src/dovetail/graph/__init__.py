"""The graph of ops: records, validation, files, grouping and a synthetic network."""

from dovetail.graph.files import load_graph, save_graph
from dovetail.graph.grouping import GroupLevels, Groups, colocate, group, group_levels
from dovetail.graph.records import EVERYWHERE, HOST, LOSS_MODULE, Graph, Phase
from dovetail.graph.synthetic import layered

__all__ = [
    "EVERYWHERE",
    "HOST",
    "LOSS_MODULE",
    "Graph",
    "GroupLevels",
    "Groups",
    "Phase",
    "colocate",
    "group",
    "group_levels",
    "layered",
    "load_graph",
    "save_graph",
]
