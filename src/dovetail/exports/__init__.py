"""Plans in the words of other tools."""

from dovetail.exports.device_map import device_map
from dovetail.exports.split_points import split_points

__all__ = ["device_map", "split_points"]
