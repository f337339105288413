"""Exports plans to the formats of other tools, and makes PyTorch models follow them."""

from dovetail.exports.device_map import DeviceMap, device_map
from dovetail.exports.dispatch import dispatch, undispatch
from dovetail.exports.model_explorer import model_explorer
from dovetail.exports.split_points import split_points

__all__ = ["DeviceMap", "device_map", "dispatch", "model_explorer", "split_points", "undispatch"]
