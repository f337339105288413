"""Runs a model on the devices that a plan says, by hooks of PyTorch alone.

    model = dispatch(model, plan)            the same object
    loss = model(**batch).loss               each module computes on its device, the CPU's there
    undispatch(model)

What `dispatch` does, and where it differs from `accelerate.dispatch_model`:

* Parameters and buffers move to the device of their module. They stay the same Parameters, so an
  optimizer that holds them goes on working; a state that it has made already stays where it was.
* A hook moves a module's inputs to its device at entry; outputs stay where they were computed.
  Within one forward of the whole model a tensor is copied once to a device, however many modules
  read it there, as plans are priced.
* Modules on the CPU are computed on the CPU. accelerate copies their weights to an accelerator at
  every forward, unless it is told that its main device is the CPU.
* A tied tensor lives with the first module that has it. Modules on another device get a copy at
  every forward, through which gradients flow back: in training it stays one parameter. Such a
  model serves one forward at a time.
* An op that a split module runs itself, between the calls of its children, runs where its inputs
  are.
"""

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, Union

from dovetail.errors import ExportError, UsageError
from dovetail.exports.device_map import DeviceMap, check_glue, first_device, home_of, module_devices
from dovetail.exports.modules import check_one_replica, graph_behind
from dovetail.graph import Graph
from dovetail.plans import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FORMAT = "hooks on a model"
HANDLES = "_dovetail_hooks"
"""Attribute of a dispatched model that holds the handles of its hooks."""
Name = Union[str, int, "torch.device"]
Network = TypeVar("Network", bound="nn.Module")
Owner = tuple["nn.Module", str]


def dispatch(
    model: Network,
    plan: Plan | Mapping[str, int | str],
    graph: Graph | None = None,
    *,
    devices: Mapping[str, Name] | None = None,
) -> Network:
    """Make the model's modules compute where the plan says; return the model itself.

    plan      a Plan, or a device map: module path -> accelerator's number or a torch device
    graph     what the plan was made for; may be left out where `plan` or `open_plan` made the plan
    devices   of a Plan: device name -> torch device. By default its GPUs are cuda:0, cuda:1 and so
              on, as many as the machine has, and its CPUs are "cpu"

    A model that was dispatched before is dispatched anew. Raises `ExportError` where modules cannot
    follow the plan, and `UsageError` for a device that is not there, for a map that leaves a tensor
    out or names what the model lacks, and for weights on the meta device, which cannot be moved.
    """
    # Path -> torch device, and the device that the model's inputs go to.
    if isinstance(plan, Plan):
        graph = graph_behind(plan, graph, FORMAT)
        check_one_replica(graph, FORMAT)
        module_homes, first = module_devices(plan, graph, lends=True), first_device(plan, graph)
        if set(module_homes) != {""}:
            check_glue(plan, graph, module_homes, first, FORMAT)
        kinds = [device.kind for device in plan.machine.devices]
        real: dict[int, torch.device] = {}
        for device in sorted({*module_homes.values(), first}):
            name = plan.machine.device_names[device]
            if devices is not None and name not in devices:
                raise UsageError("devices", f"does not say which torch device {name} is")
            usual = kinds[:device].count("gpu") if kinds[device] == "gpu" else "cpu"
            real[device] = _torch_device(usual if devices is None else devices[name], name)
        homes = {path: real[device] for path, device in module_homes.items()}
        main = real[first]
    else:
        if not plan:
            raise UsageError("plan", "is an empty device map; give a device for every module")
        homes = {path: _torch_device(given, f"module {path!r}") for path, given in plan.items()}
        on = plan.main_device if isinstance(plan, DeviceMap) else next(iter(plan.values()))
        main = _torch_device(on, "the main device")
    modules = dict(model.named_modules())
    _check_paths(model, homes)
    # (tensor, device of its module, (module, name)) of all tensors, in the model's order.
    placed: list[tuple[Tensor, torch.device, Owner]] = []
    for path, module in modules.items():
        for name, tensor in _own_tensors(module).items():
            full = f"{path}.{name}" if path else name
            home = homes.get(full) or home_of(path, homes)
            if home is None:
                raise UsageError("plan", f"has no device for {full!r} of the model")
            if tensor.is_meta and home.type != "meta":
                raise UsageError("model", f"holds {full!r} on the meta device; load its weights")
            placed.append((tensor, home, (module, name)))
    undispatch(model)
    handles: list[Any] = []
    for borrowed in _move(placed):
        handles.append(borrowed.module.register_forward_pre_hook(borrowed.lend))
        handles.append(borrowed.module.register_forward_hook(borrowed.give_back, always_call=True))
    skipped = frozenset(getattr(model, "_skip_keys_device_placement", None) or ())
    for path, module in modules.items():
        entered = home_of(path, homes) or (None if path else main)
        if entered is not None:
            entry = _ArgumentMover(entered, skipped)
            handles.append(module.register_forward_pre_hook(entry, prepend=True, with_kwargs=True))
    # Prepended after the model's own entry, so that it comes before it.
    handles.append(model.register_forward_pre_hook(_begin, prepend=True))
    handles.append(model.register_forward_hook(_end, always_call=True))
    setattr(model, HANDLES, handles)
    # Hugging Face's Trainer leaves a model that has one on its devices.
    device_map = {p: d.index if d.type == "cuda" else str(d) for p, d in homes.items()}
    object.__setattr__(model, "hf_device_map", device_map)
    return model


def undispatch(model: Network) -> Network:
    """The model itself, without the hooks of `dispatch`. Its tensors stay where they are."""
    for handle in model.__dict__.pop(HANDLES, ()):
        handle.remove()
        model.__dict__.pop("hf_device_map", None)
    return model


def _torch_device(given: Name, what: str) -> "torch.device":
    """The torch device with its index, so that equal devices compare equal.

    Raises `UsageError` if it is not there.
    """
    import torch

    try:
        device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    except (RuntimeError, TypeError):
        raise UsageError("devices", f"{given!r}, for {what}, is no torch device") from None
    if device.type != "cuda":
        return torch.device("cpu") if device.type == "cpu" else device
    count = torch.cuda.device_count()
    index = device.index if device.index is not None else 0
    if index >= count:
        raise UsageError(
            "devices",
            f"cuda:{index}, for {what}, is not there: PyTorch sees {count} GPUs; say with devices "
            "which torch device each device of the plan is",
        )
    return torch.device("cuda", index)


def _check_paths(model: "nn.Module", homes: Mapping[str, "torch.device"]) -> None:
    """Raise `UsageError` for a path that the model does not have, and `ExportError` for one module
    under two paths on two devices."""
    first: dict[int, str] = {}
    paths = set()
    for path, module in model.named_modules(remove_duplicate=False):
        paths.add(path)
        paths.update(f"{path}.{name}" if path else name for name in _own_tensors(module))
        other = first.setdefault(id(module), path)
        if home_of(path, homes) != home_of(other, homes):
            raise ExportError(
                FORMAT,
                f"module {path!r}",
                f"is {other!r} as well, and the plan puts the two on different devices; pin both "
                "to one device",
            )
    for path in homes:
        if path not in paths:
            raise UsageError("plan", f"places {path!r}, which the model does not have")


def _own_tensors(module: "nn.Module") -> dict[str, "Tensor"]:
    """Parameters and buffers of the module itself."""
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _move(placed: Iterable[tuple["Tensor", "torch.device", Owner]]) -> list["_LentTensor"]:
    """Move every tensor to its first owner's device; return what other owners borrow."""
    import torch

    from dovetail.runtime.torch_versions import can_take_data_of

    owners: dict[int, list[tuple[Tensor, torch.device, Owner]]] = {}
    for entry in placed:
        owners.setdefault(id(entry[0]), []).append(entry)
    borrowed = []
    for shared in owners.values():
        tensor, home, _ = shared[0]
        if tensor.device != home:
            data = tensor.detach().to(home)
            # It stays the same tensor, unless its type forbids that: then a new one is in its
            # place.
            if can_take_data_of(tensor, data):
                gradient = tensor.grad
                tensor.grad = None  # a gradient on another device than its tensor is refused
                tensor.data = data
                if gradient is not None:
                    tensor.grad = gradient.detach().to(home)
            else:
                if isinstance(tensor, torch.nn.Parameter):
                    data = torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
                for _, _, (module, name) in shared:
                    setattr(module, name, data)
                tensor = data
        borrowed += [
            _LentTensor(*owner, tensor, device) for _, device, owner in shared if device != home
        ]
    return borrowed


@dataclass
class _LentTensor:
    """A tensor of a module that lives on another device: the module gets a copy for the time of its
    forward."""

    module: "nn.Module"
    name: str
    source: "Tensor"
    device: "torch.device"
    version: int | None = None

    def lend(self, module: "nn.Module", _args: object) -> None:
        # An instance's own attribute comes before what `nn.Module` finds among its parameters.
        copy = _copy_to(self.source, self.device)
        self.version = None if copy.is_inference() else copy._version
        module.__dict__[self.name] = copy

    def give_back(self, module: "nn.Module", _args: object, _output: object) -> None:
        import torch

        copy = module.__dict__.pop(self.name, None)
        if copy is None or isinstance(self.source, torch.nn.Parameter):
            return
        # A buffer may have been written; tensors of inference mode do not say whether.
        if copy.is_inference() or copy._version != self.version:
            with torch.no_grad():
                self.source.copy_(copy)


@dataclass(frozen=True)
class _ArgumentMover:
    """Moves what a module is called with to its device, but for keyword arguments in `skipped`:
    a cache of keys and values holds each layer's where the layer is."""

    device: "torch.device"
    skipped: frozenset[str]

    def __call__(
        self, _module: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        move = self._move
        moved_kwargs = {k: v if k in self.skipped else move(v) for k, v in kwargs.items()}
        return tuple(move(value) for value in args), moved_kwargs

    def _move(self, value: Any) -> Any:
        return _move_value(value, self.device)


def _move_value(value: Any, device: "torch.device") -> Any:
    """A tensor, or those within lists, tuples and dicts, on the device; the same object where there
    is nothing to move. What other objects hold stays where it is."""
    from copy import copy

    import torch
    from torch.nn.utils.rnn import PackedSequence

    if isinstance(value, torch.Tensor):
        return value if value.device == device else _copy_to(value, device)
    if isinstance(value, PackedSequence):  # whose batch sizes stay on the CPU
        # Its stub declares the overload for a dtype alone.
        return value if value.data.device == device else value.to(device)  # type: ignore[arg-type]
    if isinstance(value, dict):
        items = {key: _move_value(item, device) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        if type(value) is dict:
            return items
        # A copy of the object, as its class' constructor may take anything.
        alike = copy(value)
        for key, item in items.items():
            alike[key] = item
        return alike
    if isinstance(value, list | tuple):
        parts = [_move_value(item, device) for item in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


@dataclass
class _ForwardCopies:
    """Copies made in one forward of a whole model: (tensor, device, with gradients) -> the tensor,
    its version then, and its copy. It holds the tensor, so that no other gets its id."""

    around: "_ForwardCopies | None"
    copies: dict[tuple[int, "torch.device", bool], tuple["Tensor", int, "Tensor"]]


# The copies of the forward that is running. A context variable keeps them per thread, and `around`
# keeps those of the calls around a nested one.
_SENT: ContextVar[_ForwardCopies | None] = ContextVar("dovetail_sent", default=None)


def _begin(_module: "nn.Module", _args: object) -> None:
    _SENT.set(_ForwardCopies(_SENT.get(), {}))


def _end(_module: "nn.Module", _args: object, _output: object) -> None:
    sent = _SENT.get()
    _SENT.set(sent and sent.around)


def _copy_to(tensor: "Tensor", device: "torch.device") -> "Tensor":
    """A copy on the device, through which gradients flow; in one forward the same again, unless
    the tensor was written in between."""
    import torch

    # Only copies to an accelerator are ordered before what reads them without waiting.
    copy: Callable[[], Tensor] = lambda: tensor.to(device, non_blocking=device.type == "cuda")  # noqa: E731
    sent = _SENT.get()
    # Tensors of inference mode count no versions, so a write between two uses would go unnoticed.
    if sent is None or tensor.is_inference():
        return copy()
    key = (id(tensor), device, torch.is_grad_enabled())
    entry = sent.copies.get(key)
    if entry is None or entry[1] != tensor._version:
        entry = sent.copies[key] = (tensor, tensor._version, copy())
    return entry[2]
