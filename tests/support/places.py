"""Devices that are not there: tensors with numbers that say they are on another device.

`On` holds a tensor of the CPU and a made-up device. An op that reads tensors of two devices is
refused, as a GPU would, and what it computes is on the device of what it read. So hooks that move
tensors are tested with their numbers, and with gradients, where there is one device only.
"""

from typing import ClassVar

import torch
from torch.utils._pytree import tree_map

MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class On(torch.Tensor):
    computed: ClassVar[list] = []  # (op, device) of each op, in order

    @staticmethod
    def __new__(cls, data, place):
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=data.dtype, device="meta",
            requires_grad=data.requires_grad, dispatch_device=True,
        )  # fmt: skip
        made.held, made.place = data, torch.device(place)
        return made

    def __repr__(self):
        return f"On({self.held}, {self.place})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            return args[0].place
        places = []

        def held(value):
            if isinstance(value, On):
                places.append(value.place)
                return value.held
            if isinstance(value, torch.Tensor) and value.dim():
                places.append(value.device)
            return value

        inner_args, inner_kwargs = tree_map(held, (args, kwargs))
        if func not in MOVES and len(set(places)) > 1:
            raise RuntimeError(f"{func} reads tensors on {sorted(map(str, set(places)))}")
        place = inner_kwargs.pop("device", None) or places[0]
        if func is torch.ops.aten._to_copy.default:
            inner_kwargs.pop("non_blocking", None)
        found = func(*inner_args, **inner_kwargs)
        cls.computed.append((func.overloadpacket.__name__, str(place)))
        if func._schema.is_mutable:
            return args[0]
        return tree_map(lambda v: cls(v, place) if isinstance(v, torch.Tensor) else v, found)


def spread(monkeypatch):
    """From now on, tensors that are sent to meta:0, meta:1 and so on keep their numbers, and say
    they are there. The list returned fills with (op, device) of what is computed there, and of
    what is sent there."""
    plain = torch.Tensor.to

    class _Arrive(torch.autograd.Function):
        @staticmethod
        def forward(_context, tensor, place):
            On.computed.append(("send", str(place)))
            return On(tensor.clone(), place)

        @staticmethod
        def backward(_context, gradient):
            return gradient.held.clone() if isinstance(gradient, On) else gradient, None

    class _Leave(torch.autograd.Function):
        @staticmethod
        def forward(context, tensor):
            context.place = tensor.place
            return tensor.held.clone()

        @staticmethod
        def backward(context, gradient):
            return On(gradient.clone(), context.place)

    def to(self, *args, **kwargs):
        device = kwargs.get("device", args[0] if args else None)
        if not isinstance(device, torch.device) or device == self.device:
            return plain(self, *args, **kwargs)
        if isinstance(self, On):
            if device.type == "cpu":
                return _Leave.apply(self)
            return _Arrive.apply(_Leave.apply(self), device)
        return _Arrive.apply(self, device)

    monkeypatch.setattr(torch.Tensor, "to", to)
    On.computed = []
    return On.computed
