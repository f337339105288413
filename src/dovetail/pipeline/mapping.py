"""Makes a device map of a model, or of a configuration of transformers, in one call.

    AutoModelForCausalLM.from_pretrained(
        name, device_map=dt.device_map(AutoConfig.from_pretrained(name), "4 x a100", context=8192)
    )

Nothing is downloaded and no weights are allocated: a configuration is built on the meta device.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.errors import MissingLibraryError, UsageError
from dovetail.exports import DeviceMap
from dovetail.exports import device_map as map_of_plan
from dovetail.frontends import Captured
from dovetail.frontends.capturing import capture_call
from dovetail.frontends.transformers_configs import dtype_of, positions_of
from dovetail.graph import Graph
from dovetail.machine import Machine
from dovetail.pipeline.planning import plan as find_plan
from dovetail.pipeline.sources import resolve_machine
from dovetail.plans import Plan
from dovetail.units import HERE

CONTEXT = 8192
"""By default a plan is for this many tokens, or for as many as the model has positions, if that is
less."""


def device_map(
    model: Any,
    machine: Any = "",
    *,
    batch: int = 1,
    context: int | None = None,
    inputs: Mapping[str, Any] | None = None,
    names: Mapping[str, int | str] | None = None,
    budget: str | float = "10s",
) -> DeviceMap:
    """The map of modules to devices for accelerate and transformers: {"model.layers.0": 0, ...}.

    model     an `nn.Module` (its weights are not read, and may be on the meta device), a
              configuration of transformers, or a `Plan`
    machine   a `Machine` or its text, such as "4 x a100"; with a `Plan` the graph it was made for
    batch, context   samples, and tokens of each, of the forward pass that is planned for: by
              default 8192, or as many as the model has positions for
    inputs    keyword arguments of a model that does not take `input_ids` alone
    names     with a `Plan`: device name -> what accelerate is to call it
    budget    of the search

    Memory counts weights, activations, and the cache of keys and values for `context` tokens where
    the model returns one. The CPU computes nothing where there are accelerators: what
    `from_pretrained` maps to "cpu" it streams to one of them at every forward. `dispatch` does
    compute there. Raises `InfeasibleError` where the model does not fit.
    """
    if isinstance(model, Plan):
        if machine and not isinstance(machine, Graph | Captured):
            raise UsageError("machine", "a plan brings its own; give the graph it was made for")
        graph = machine.graph if isinstance(machine, Captured) else machine or None
        return map_of_plan(model, graph, names)
    if names is not None:
        raise UsageError("names", "is for a plan; a machine's accelerators are numbered in order")
    where = _accelerators(resolve_machine(machine or HERE))
    step = _capture(model, batch, context, inputs)
    return map_of_plan(find_plan(step, where, format="device-map", budget=budget), step.graph)


def _accelerators(machine: Machine) -> Machine:
    """The machine with its CPUs as hosts that compute nothing, if it has a GPU."""
    # accelerate never computes on the CPU beside an accelerator: see `device_map`.
    if all(device.kind != "gpu" for device in machine.devices):
        return machine
    devices = tuple(
        replace(device, kind="host") if device.kind == "cpu" else device
        for device in machine.devices
    )
    return replace(machine, devices=devices)


def _capture(
    model: Any, batch: int, context: int | None, inputs: Mapping[str, Any] | None
) -> Captured:
    """The captured forward pass. If the model returns a cache of keys and values, the cache is an
    output."""
    import torch

    if batch < 1:
        raise UsageError("batch", f"is {batch}; use a whole number of at least 1")
    module = model if isinstance(model, torch.nn.Module) else _build(model)
    given = dict(inputs) if inputs is not None else _tokens(module, batch, context)
    return capture_call(module, (), given)


def _build(config: Any) -> Any:
    """The model of a configuration, on the meta device."""
    import torch

    try:
        import transformers
    except ImportError:
        raise MissingLibraryError("transformers", "pip install transformers") from None
    if not isinstance(config, transformers.PretrainedConfig):
        raise UsageError(
            "model",
            f"is a {type(config).__name__}; give a module, a configuration of transformers, or a "
            "plan",
        )
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    with torch.device("meta"):
        return auto.from_config(config, dtype=dtype_of(config)).eval()  # type: ignore[no-untyped-call]  # theirs


def _tokens(module: Any, batch: int, context: int | None) -> dict[str, Any]:
    """Example inputs of a language model, on the device of its weights."""
    import torch

    taken = inspect.signature(module.forward).parameters
    if "input_ids" not in taken:
        raise UsageError(
            "inputs",
            f"{type(module).__name__} takes no input_ids; give its keyword arguments as inputs",
        )
    config = getattr(module, "config", None)
    positions = positions_of(config) if hasattr(config, "get_text_config") else None
    if context is None:
        context = min(CONTEXT, positions or CONTEXT)
    if context < 1 or (positions is not None and context > positions):
        limit = "" if positions is None else f" to {positions}, the model's positions"
        raise UsageError("context", f"is {context}; use a number of tokens from 1{limit}")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    given: dict[str, Any] = {
        "input_ids": torch.zeros(batch, context, dtype=torch.long, device=device)
    }
    # The cache is asked for so that it is an output of the graph and counts as memory.
    if "use_cache" in taken:
        given["use_cache"] = True
    return given
