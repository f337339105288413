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
    where = resolve_machine(machine or HERE)
    # accelerate never computes on the CPU beside an accelerator, so CPUs are hosts there.
    if any(device.kind == "gpu" for device in where.devices):
        devices = tuple(
            replace(device, kind="host") if device.kind == "cpu" else device
            for device in where.devices
        )
        where = replace(where, devices=devices)
    import torch

    if batch < 1:
        raise UsageError("batch", f"is {batch}; use a whole number of at least 1")
    module = model
    if not isinstance(model, torch.nn.Module):
        try:
            import transformers
        except ImportError:
            raise MissingLibraryError("transformers", "pip install transformers") from None
        if not isinstance(model, transformers.PretrainedConfig):
            raise UsageError(
                "model",
                f"is a {type(model).__name__}; give a module, a configuration of transformers, or "
                "a plan",
            )
        causal = type(model) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        with torch.device("meta"):
            module = auto.from_config(model, dtype=dtype_of(model)).eval()  # type: ignore[no-untyped-call]  # theirs
    # By default the inputs are those of a language model, on the device of its weights.
    given: dict[str, Any] = dict(inputs) if inputs is not None else {}
    if inputs is None:
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
        place = next((p.device for p in module.parameters()), torch.device("cpu"))
        given["input_ids"] = torch.zeros(batch, context, dtype=torch.long, device=place)
        # The cache of keys and values is asked for so that it is an output of the graph and counts
        # as memory.
        if "use_cache" in taken:
            given["use_cache"] = True
    step = capture_call(module, (), given)
    return map_of_plan(find_plan(step, where, format="device-map", budget=budget), step.graph)
