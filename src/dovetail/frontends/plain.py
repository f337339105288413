"""A captured step as its user runs it without a plan: the module, its loss, torch's own optimizer.

    eager           module(*inputs) ─► loss ─► backward ─► step of torch.optim
    torch.compile   the same, with module and loss compiled together

Plans are compared with these, and where one of them is the fastest it is what runs.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import UsageError
from dovetail.frontends.optimizers import torch_optimizer
from dovetail.frontends.program import PlainStep, Signature
from dovetail.frontends.structures import substitute


def loss_of(loss: Callable[..., Any] | None, output: Any, arguments: Sequence[Any]) -> Any:
    """Return loss(output, *arguments); without a loss function the output if it is a tensor, else
    its entry or attribute `loss`, or None if it has none."""
    if loss is not None:
        return loss(output, *arguments)
    if isinstance(output, Tensor):
        return output
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


_AUTOCAST = (torch.bfloat16, torch.float16)
"""The dtypes of `torch.autocast`."""
GRAPHS = "reduce-overhead"
"""The mode of `torch.compile` that replays CUDA graphs."""


class LossAndGradients(nn.Module):
    """A user's model and loss as one module, whose output is the loss and its gradients.

    accumulate   the gradients are those of the loss divided by it
    dtype        of autocast; None: off
    trained      names of the parameters whose gradients are returned
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | None,
        accumulate: int,
        dtype: torch.dtype | None,
        trained: tuple[str, ...] = (),
    ) -> None:
        for name, fits, detail in (
            ("model", isinstance(model, nn.Module), "is no torch.nn.Module"),
            ("loss", loss is None or callable(loss), "is no function; give loss(output, *targets)"),
            (
                "accumulate",
                type(accumulate) is int and accumulate >= 1,
                f"is {accumulate!r}; give a number of calls from 1 on",
            ),
            (
                "autocast",
                dtype is None or dtype in _AUTOCAST,
                f"is {dtype!r}; give torch.bfloat16 or torch.float16",
            ),
        ):
            if not fits:
                raise UsageError(name, detail)
        super().__init__()
        self.model, self.loss, self.accumulate, self.dtype = model, loss, accumulate, dtype
        self.trained = trained

    def losses(
        self, args: Any, kwargs: Any, targets: Any, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(the loss, what is differentiated)."""
        casts: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.dtype is not None:
            casts = torch.autocast(next(self.parameters()).device.type, dtype=self.dtype)
        with casts:
            value = loss_of(self.loss, self.model(*args, **kwargs), targets)
        if not isinstance(value, Tensor):
            raise UsageError("loss", f"is a {type(value).__name__}, where it must be a tensor")
        value = value.reshape(())
        scaled = value / self.accumulate if self.accumulate > 1 else value
        return value.detach(), scaled if scale is None else scaled * scale

    def forward(
        self, args: Any, kwargs: Any, targets: Any, scale: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        with torch.enable_grad():
            value, differentiated = self.losses(args, kwargs, targets, scale)
            parameters = dict(self.named_parameters())
            gradients = torch.autograd.grad(
                differentiated, [parameters[name] for name in self.trained], allow_unused=True
            )
        return value, gradients


class PlainModule:
    """The module at work: each step changes its parameters and the optimizer's state.

    module      with real weights; it is used as it is, not copied
    mode        of `torch.compile`, which compiles module and loss in the first step; "": it is not
                used
    infers      steps run in inference mode
    """

    def __init__(
        self, module: nn.Module, signature: Signature, step: PlainStep, *, mode: str = ""
    ) -> None:
        self.module, self.loss = module, step.loss
        self._signature = signature
        self.infers = step.optimizer is None and not step.differentiates
        self._compute: Callable[..., Any] = _compute(module, step)
        if mode:
            # torch counts compilations of a code object, and stops compiling after eight. Each step
            # has a code object of its own.
            compute: Any = _compute(module, step)
            if isinstance(module, LossAndGradients):
                # Its user would compile what makes the loss, and let autograd run the rest.
                compute = LossAndGradients.losses
            code = compute.__code__.replace()
            own = FunctionType(code, compute.__globals__, closure=compute.__closure__)
            compiled = torch.compile(own, mode=mode)
            if isinstance(module, LossAndGradients):
                module.losses = partial(compiled, module)  # type: ignore[method-assign]
            else:
                self._compute = compiled
        # The next step's graph may overwrite the tensors that this step returned.
        self._begins = torch.compiler.cudagraph_mark_step_begin if mode == GRAPHS else None
        self._parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._buffers = [part._buffers for part in module.modules() if part._buffers]
        self._optimizer: torch.optim.Optimizer | None = None
        if step.optimizer is not None:
            trained = [p for p in module.parameters() if p.requires_grad]
            self._optimizer = torch_optimizer(step.optimizer, trained)

    def step(self, tensors: Sequence[Tensor], *, ordinary: bool = True) -> Any:
        """Run one step on inputs and targets, as `Signature` orders them. Returns the loss in
        training, and else what the module returns. The caller can neither differentiate nor write
        tensors of inference mode; with `ordinary` the result has tensors of the same memory that
        the caller can."""
        signature, optimizer = self._signature, self._optimizer
        count = len(signature.names)
        if self._begins is not None:
            self._begins()  # type: ignore[no-untyped-call]
        args, kwargs = signature.call(tensors[:count])
        if optimizer is None:
            if not self.infers:
                with torch.no_grad():
                    return self._compute(args, kwargs, ())
            # Without autograd's part of each call, small steps take up to an eighth less time.
            with torch.inference_mode():
                result = self._compute(args, kwargs, ())
            return ordinary_result(result) if ordinary else result
        optimizer.zero_grad(set_to_none=True)
        loss = self._compute(args, kwargs, signature.loss_arguments(tensors[count:]))
        loss.backward()
        optimizer.step()
        return loss.detach()

    def owns(self, tensor: Tensor) -> bool:
        """True if the tensor lies in the memory of a parameter or buffer."""
        address = tensor.untyped_storage().data_ptr()
        # A step may assign buffers.
        buffers = (value for table in self._buffers for value in table.values())
        return address in self._parameters or any(
            value is not None and value.untyped_storage().data_ptr() == address for value in buffers
        )

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return "PARAMETER/NAME" -> the tensor itself, of each state that exists. An optimizer has
        none before its first step."""
        if self._optimizer is None:
            return {}
        return {
            f"{name}/{key}": value
            for name, parameter in self.module.named_parameters()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def set_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the optimizer's state by copies of these tensors, named as `optimizer_state`
        names them."""
        assert self._optimizer is not None, "inference has no optimizer"
        for name, parameter in self.module.named_parameters():
            # torch keeps the counts of steps on the CPU, and all else beside the parameter.
            own = {
                entry: value.clone().to("cpu" if entry == "step" else parameter.device)
                for key, value in state.items()
                for owner, _, entry in (key.rpartition("/"),)
                if owner == name
            }
            if own:
                self._optimizer.state[parameter] = own


def ordinary_result(result: Any) -> Any:
    """Return the result with tensors of the same memory that the caller may differentiate and
    write, which torch refuses for those that were made in inference mode."""
    # Most results are a tensor or tuples of tensors, which this spares the walk of `substitute`.
    if type(result) is tuple:
        return tuple(map(ordinary_result, result))
    if not isinstance(result, Tensor):
        return substitute(result, Tensor, ordinary_result)
    tensor = result
    if not tensor.is_inference():
        return tensor
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_quantized:
        return tensor.clone()
    if tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return tensor.new_empty(0).set_(tensor.untyped_storage(), *place)


def _compute(module: nn.Module, step: PlainStep) -> FunctionType:
    """Return compute(args, kwargs, arguments of the loss): the module's output, or the loss."""
    trains, loss = step.optimizer is not None, step.loss
    device = next((p.device.type for p in module.parameters()), "cpu")
    dtype = step.autocast

    def compute(args: Any, kwargs: Any, arguments: Any) -> Any:
        output = module(*args, **kwargs)
        return loss_of(loss, output, arguments).reshape(()) if trains else output

    def cast(args: Any, kwargs: Any, arguments: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            return compute(args, kwargs, arguments)

    found = compute if dtype is None else cast
    assert isinstance(found, FunctionType)
    return found
