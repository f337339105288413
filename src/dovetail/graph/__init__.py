"""Graphs: records, validation, files, grouping."""

from dovetail.graph.files import load_graph, save_graph
from dovetail.graph.grouping import Groups, group
from dovetail.graph.records import EVERYWHERE, HOST, Graph, Phase

__all__ = ["EVERYWHERE", "HOST", "Graph", "Groups", "Phase", "group", "load_graph", "save_graph"]
