"""Makes any `nn.Module` a learner whose parameters are views of one flat vector.

    theta [size] ─view─► parameters ─► forward, backward ─copy─► gradient [size]
    theta [size] ─copy─► twins, gradient ─view─► their grads ─► torch.optim's step ─► U(g)

The optimizer is the user's own, from `torch.optim` or with the same interface. It steps on twins of
the parameters, and U(g) is the change that its step made. So `theta += U(g)` does what the
optimizer would have done to the module itself. The optimizer and its state belong to one worker. A
worker that is restarted begins with a new optimizer.

On another device (`device`) the parameters are views of a vector there, and each gradient begins
with a copy of theta to it and ends with one of the gradient from it. The optimizer works there too.

    theta [size] ─copy─► vector there ─view─► parameters ─► ... ─► gradient there ─copy─► gradient

The vector holds tied parameters once, and frozen ones (`requires_grad=False`) not at all. Buffers
belong to a worker and are never sent; `validation.py` computes the trained model's statistics.
"""

import copy
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dovetail.errors import ModelError, UsageError
from dovetail.runtime.torch_versions import pytree
from dovetail.runtime.user_code import UserCode, at
from dovetail.training.datasets import (
    ArrangedSource,
    Collate,
    StreamSource,
    open_dataset,
    split_batch,
)
from dovetail.training.keras_models import (
    added_losses,
    call_keras,
    check_keras,
    is_keras,
    seed_keras,
    with_added_losses,
)
from dovetail.training.learner import Gradient
from dovetail.training.records import Vector
from dovetail.training.torch_optimizers import (
    MakeOptimizer,
    Rates,
    Schedule,
    check_optimizer,
    steps_as_torch_does,
)

Loss = Callable[..., Tensor]
"""loss(output, *targets): the mean loss over the batch's samples, a scalar."""

_KERAS_COUNT = re.compile(r"_\d+(?=/|$)")
DTYPES: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
"""torch's type -> numpy's, of the parameters that can be trained."""


def check_module(model: Any) -> None:
    """Raises `ModelError` for what is no module, and for a Keras model that cannot be called."""
    if is_keras(model):
        check_keras(model)
    if not isinstance(model, nn.Module):
        raise ModelError(type(model).__name__, f"is no torch.nn.Module{at(model)}")


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters, each once, in the module's order.

    Raises `ModelError` if they cannot form one float vector in the CPU's memory.
    """
    name = type(module).__name__
    all_named = named_parameters(module)
    for path, tensor in (*all_named, *module.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(name, f"{path} has no shape yet; call the model once{at(module)}")
    named = [(path, p) for path, p in all_named if p.requires_grad]
    for path, parameter in named:
        if parameter.layout != torch.strided:
            raise ModelError(name, f"{path} is sparse; only dense parameters train{at(module)}")
        if parameter.dtype not in DTYPES:
            raise ModelError(name, f"{path} is {parameter.dtype}; only float32 and float64 train")
        if parameter.device.type != "cpu":
            raise ModelError(name, f"{path} is on {parameter.device}; move the model to the CPU")
    if not named:
        raise ModelError(name, "has no parameter that requires a gradient")
    if len({parameter.dtype for _, parameter in named}) > 1:
        raise ModelError(name, "mixes float32 and float64 parameters; convert it to one of them")
    # Views of the vector would not share memory as such parameters do. Tied parameters are allowed:
    # they are one object.
    owner: dict[int, str] = {}
    for path, parameter in named:
        if parameter.numel():
            other = owner.setdefault(parameter.untyped_storage().data_ptr(), path)
            if other != path:
                says = f"{other} and {path} share memory; tie them by one Parameter"
                raise ModelError(name, says)
    return [parameter for _, parameter in named]


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(path, parameter), each parameter once. A Keras model's are in its layers' order.

    torch would sort a Keras model's by name, and Keras counts its layers over the whole process
    (`dense_9`, `dense_10`). The same model built once more would have another order, and a
    checkpoint's vector would not fit it. The counts are left out of these paths.
    """
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, inner in module.named_modules():
        if is_keras(inner):
            layer: Any = inner
            own = [(_KERAS_COUNT.sub("", v.path), v.value) for v in layer.variables]
        else:
            own = list(inner.named_parameters(prefix, recurse=False))
        for path, parameter in own:
            named.setdefault(id(parameter), (path, parameter))
    return list(named.values())


def flatten(module: nn.Module) -> Vector:
    """A copy of the trainable parameters as one vector [size]."""
    parameters = parameters_of(module)
    theta: Vector = np.empty(sum(p.numel() for p in parameters), DTYPES[parameters[0].dtype])
    for view, parameter in zip(
        views_of(torch.from_numpy(theta), parameters), parameters, strict=True
    ):
        view.copy_(parameter.detach())
    return theta


def unflatten(module: nn.Module, theta: Vector) -> None:
    """Copies `theta` [size] into the trainable parameters."""
    parameters = parameters_of(module)
    size = sum(p.numel() for p in parameters)
    if theta.shape != (size,):
        raise ModelError(
            type(module).__name__, f"has {size} parameters, not the {theta.shape} of this vector"
        )
    fill(parameters, theta)


def fill(parameters: list[nn.Parameter], theta: Vector) -> None:
    """Copies `theta` [size] into these parameters, all of which are on one device."""
    flat = torch.from_numpy(np.ascontiguousarray(theta)).to(parameters[0].device)
    with torch.no_grad():
        for view, parameter in zip(views_of(flat, parameters), parameters, strict=True):
            parameter.copy_(view)


def views_of(flat: Tensor, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The parts of a vector [size] in the parameters' shapes."""
    views, start = [], 0
    for parameter in parameters:
        stop = start + parameter.numel()
        views.append(flat[start:stop].view(parameter.shape))
        start = stop
    return views


def loss_of(module: nn.Module, loss: Loss, batch: Any) -> Tensor:
    """The loss of a batch, with the graph that autograd needs for the backward pass. What Keras
    models, the module itself or inside it, add to the loss is added."""
    output, targets = outputs(module, batch)
    with UserCode("the loss", loss, module):
        mean = loss(output, *targets)
    if not isinstance(mean, Tensor):
        raise UsageError("loss", f"returns {type(mean).__name__}, not a tensor{at(loss)}")
    if mean.numel() != 1:
        shape = tuple(mean.shape)
        raise UsageError("loss", f"is of shape {shape}; it must be one number, a mean{at(loss)}")
    return with_added_losses(mean, added_losses(module))


def outputs(module: nn.Module, batch: Any) -> tuple[Any, tuple[Any, ...]]:
    """(output, targets) of a batch, in the mode that the module is in."""
    arguments, keywords, targets = split_batch(batch)
    with UserCode("the model", module):
        if is_keras(module):
            return call_keras(module, arguments, keywords), targets
        return module(*arguments, **keywords), targets


class ModuleLearner:
    """A worker's module, data set and optimizer; see `learner.Learner`.

    `gradient` seeds torch from (seed, worker, epoch, first sample), so that dropout does not depend
    on which steps came before. The loss must be a mean over samples: with another reduction, a
    short batch at the end of an epoch would have a wrong weight.

    module     belongs to this learner from then on
    dataset    may be a `SampleSource`
    schedule   see `torch_optimizers`
    device     where the module computes, as torch names it
    autocast   dtype of `torch.autocast` around model and loss; "": none
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: MakeOptimizer,
        dataset: Any,
        schedule: Schedule | None = None,
        *,
        seed: int = 0,
        worker: int = 0,
        device: str = "cpu",
        autocast: str = "",
    ) -> None:
        self._module, self._loss = module.train(), loss
        self._device, self._autocast = torch.device(device), autocast
        self._source = open_dataset(dataset)
        self._seed, self._worker, self._is_keras = seed, worker, is_keras(module)
        self._parameters = parameters_of(module)
        theta = flatten(module)
        self.size, self.dtype = theta.size, str(theta.dtype)
        # The vector that the parameters are views of; None: they have memory of their own.
        self._bound: Vector | None = None
        self._home = torch.from_numpy(theta)
        # Pinned memory is copied to and from a GPU faster.
        pinned = self._device.type == "cuda"
        self._flat = torch.zeros_like(self._home, pin_memory=pinned)
        self._gradient = self._flat.numpy()
        # The same as the two before, where the module computes. On the CPU they are the same.
        self._home_there, self._flat_there = self._home, self._flat
        self._theta_there: Tensor | None = None
        if device != "cpu":
            self._home_there = self._home.to(self._device)
            self._flat_there = torch.zeros_like(self._home_there)
            self._theta_there = self._home_there.clone()
            self._module.to(self._device)
            self._set_parameters(self._theta_there)
        self._pieces = views_of(self._flat_there, self._parameters)
        # The user's optimizer gets twins of the parameters. They are views of `_home`, and their
        # gradients are views of `_flat`, where the module computes.
        twins = [nn.Parameter(view) for view in views_of(self._home_there, self._parameters)]
        for twin, piece in zip(twins, self._pieces, strict=True):
            twin.grad = piece
        with UserCode("making the optimizer", optimizer):
            made = optimizer(twins)
        self._optimizer = check_optimizer(made, twins, optimizer)
        self._rates = Rates(self._optimizer, schedule)

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        """The gradient of the mean loss over these samples; over fewer if a stream ends."""
        seeds = np.random.SeedSequence((self._seed, self._worker, epoch, int(indices[0])))
        draw = int(seeds.generate_state(1)[0])
        torch.default_generator.manual_seed(draw)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(draw)
        if self._is_keras:
            seed_keras(self._module, draw)
        batch, samples = self._source.batch(indices, epoch)
        if not samples:
            self._flat.zero_()
            return Gradient(self._gradient, 0.0, 0)
        if self._theta_there is not None:
            with warnings.catch_warnings():
                # torch cannot say that a tensor may not be written to, and warns of that. Nobody
                # writes to this one.
                warnings.simplefilter("ignore", UserWarning)
                self._theta_there.copy_(torch.from_numpy(theta))
            batch = to_device(batch, self._device)
        elif theta is not self._bound:
            # The parameters become views of theta, or of a copy where theta is read-only.
            flat = torch.from_numpy(theta) if theta.flags.writeable else torch.tensor(theta)
            self._bound = theta if theta.flags.writeable else None
            self._set_parameters(flat)
        for parameter in self._parameters:
            parameter.grad = None
        with autocasting(self._device, self._autocast):
            loss = loss_of(self._module, self._loss, batch)
        with UserCode("the backward pass", self._module):
            loss.backward()  # type: ignore[no-untyped-call]
        for piece, parameter in zip(self._pieces, self._parameters, strict=True):
            store_gradient(piece, parameter.grad)
        if self._theta_there is not None:
            self._flat.copy_(self._flat_there)
        return Gradient(self._gradient, float(loss.detach()), samples)

    def update(self, theta: Vector, gradient: Vector, epoch: float) -> Vector:
        """Returns U(g). `gradient` may be any vector [size]; if it is not the one that `gradient()`
        returned last, it is copied over that."""
        if gradient is not self._gradient:
            self._gradient[:] = gradient
        # Without locks (Hogwild!) other workers write to theta during this step. The change must be
        # computed against one copy of it, which then holds the result.
        change = theta.copy()
        self._home_there.copy_(torch.from_numpy(change))
        if self._theta_there is not None:
            self._flat_there.copy_(self._flat)
        self._rates.set(self._passes(epoch))
        with UserCode("a step of the optimizer", self._optimizer):
            self._optimizer.step()
        if self._theta_there is not None:
            self._home.copy_(self._home_there)
        np.subtract(self._home.numpy(), change, out=change)
        return change

    @property
    def settings(self) -> str:
        """The optimizer's class and the settings of its groups, of those that are plain values."""
        groups = [
            {k: v for k, v in sorted(group.items()) if isinstance(v, int | float | str | tuple)}
            for group in self._optimizer.param_groups
        ]
        return f"{type(self._optimizer).__name__} {groups}"

    @property
    def steps_as_torch_does(self) -> bool:
        """Whether a step of the optimizer needs no trial."""
        return steps_as_torch_does(self._optimizer)

    def rate(self, epoch: float) -> float:
        """The learning rate of the optimizer's first group."""
        return self._rates.at(self._passes(epoch))

    def _set_parameters(self, flat: Tensor) -> None:
        """Makes the parameters views of a vector [size]."""
        for parameter, view in zip(self._parameters, views_of(flat, self._parameters), strict=True):
            parameter.data = view

    def _passes(self, epoch: float) -> float:
        """Epochs so far, for the schedule. In a stream only the reader can tell them."""
        return self._source.passed if isinstance(self._source, StreamSource) else epoch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device."""
    return pytree.tree_map_only(Tensor, lambda value: value.to(device, non_blocking=True), batch)


def autocasting(device: torch.device, dtype: str) -> torch.autocast:
    """The context of `torch.autocast` in a dtype by its name; "": it is off."""
    named = getattr(torch, dtype) if dtype else None
    return torch.autocast(device.type, dtype=named, enabled=bool(dtype))


def check_gpu_name(name: str) -> None:
    """Raise `UsageError` unless "cuda" or "cuda:N" is here. "cuda" is any of the GPUs."""
    if not torch.cuda.is_available():
        raise UsageError("device", f"{name!r} is not here: torch sees no GPU")
    number = name.removeprefix("cuda").removeprefix(":") or "0"
    if int(number) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UsageError("device", f"{name!r} is not here; torch sees cuda:0 to cuda:{last}")


def device_of(text: str, worker: int) -> str:
    """The device of a worker: "cuda" gives the GPUs in turn, and other names stand for
    themselves."""
    if text != "cuda":
        return text
    return f"cuda:{worker % max(torch.cuda.device_count(), 1)}"


def store_gradient(piece: Tensor, gradient: Tensor | None) -> None:
    """Copies a parameter's gradient; None, of one that the loss does not depend on, is zeros."""
    if gradient is None:
        piece.zero_()
    else:
        piece.copy_(gradient.to_dense() if gradient.is_sparse else gradient)


@dataclass(frozen=True)
class ModuleLearners:
    """Makes a worker's learner by its index. This record is sent to the worker's process.

    arrangement   [samples] the samples of the data set in the order of `positions.arrangement`;
                  None: as they are
    """

    module: nn.Module
    loss: Loss
    optimizer: MakeOptimizer
    dataset: Any
    schedule: Schedule | None = None
    collate: Collate | None = None
    epochs: int = 1
    seed: int = 0
    arrangement: NDArray[np.int64] | None = None
    device: str = "cpu"
    autocast: str = ""

    def __call__(self, worker: int) -> ModuleLearner:
        """A learner with its own copy of the module."""
        source = open_dataset(self.dataset, self.collate, self.epochs)
        if self.arrangement is not None:
            source = ArrangedSource(source, self.arrangement)
        return ModuleLearner(
            copy.deepcopy(self.module), self.loss, self.optimizer, source, self.schedule,
            seed=self.seed, worker=worker, device=device_of(self.device, worker),
            autocast=self.autocast,
        )  # fmt: skip
