"""Networks whose steps read or leave something that is no parameter, buffer or input.

Each runs as plain PyTorch runs it, or is refused. Anything else is a trap that `capture` fell into.
"""

import collections
import contextvars
import copy
import functools
import itertools
import os
import random
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cases import REGISTRY, Model
from other_cases import squares, vectors
from torch import Tensor, nn

TRAPS = "traps of hidden state"
Forward = Callable[[Any, Tensor], Tensor]


class Parts(nn.Module):
    """What the traps use. All of it is made in each process anew."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.slow = nn.Linear(8, 8).requires_grad_(False)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("whole", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(4, 8))
        self.register_buffer("unsaved", torch.ones(8), persistent=False)
        self.register_buffer("late", None)
        self.calls, self.array, self.numbers = 0, np.ones(1), itertools.count(1)
        self.kept: Any = None
        self.past: list[Any] = []
        self.table: dict[Any, Any] = {}
        self.plain = torch.ones(8)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def trap(expected: str = "") -> Callable[[Forward], Forward]:
    """A trap; `expected` says why it may be refused."""

    def register(run: Forward) -> Forward:
        REGISTRY.add(f"trap_{run.__name__}", TRAPS, refused=expected, exports=False)(
            lambda: Model(Parts(run), vectors, squares)
        )
        return run

    return register


STATE = "a step reads what the step before has left outside of buffers"
CHANCE = "a step draws from a generator that is not torch's default one"
DATA = "a branch on data"
TRAINED = "a step writes over a parameter that it trains"


# Buffers, which are the right place for state: these are right.


@trap()
def buffer_count(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return self.a(x) * self.count


@trap()
def whole_buffer_count(self: Any, x: Tensor) -> Tensor:
    self.whole.add_(1)
    return self.a(x) * (self.whole % 2)


@trap()
def buffer_reassigned(self: Any, x: Tensor) -> Tensor:
    self.count = self.count + x.detach().mean()
    return self.a(x) - self.count


@trap()
def buffer_data_assigned(self: Any, x: Tensor) -> Tensor:
    self.count.data = self.count.data + 1
    return self.a(x) * self.count


@trap()
def queue_rolled(self: Any, x: Tensor) -> Tensor:
    self.queue.copy_(torch.cat([self.queue[1:], x[:1]]))
    return self.a(x) + self.queue.mean(0)


@trap()
def queue_by_pointer(self: Any, x: Tensor) -> Tensor:
    at = (self.whole + torch.arange(2)) % 4
    self.queue[at] = x[:2]
    self.whole += 2
    return self.a(x) + self.queue.sum(0)


@trap()
def memory_bank_read_first(self: Any, x: Tensor) -> Tensor:
    y = self.a(x) + self.queue.mean(0)
    self.queue[:] = y.detach()[:4]
    return y


@trap()
def momentum_encoder(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for slow, fast in zip(self.slow.parameters(), self.a.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)
        target = self.slow(x)
    return self.a(x) - target


@trap()
def momentum_encoder_after(self: Any, x: Tensor) -> Tensor:
    y = self.a(x) - self.slow(x).detach()
    for slow, fast in zip(self.slow.parameters(), self.a.parameters(), strict=True):
        slow.data.copy_(torch.lerp(slow.data, fast.data, 0.1))
    return y


@trap()
def momentum_encoder_by_lerp(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.queue.lerp_(self.a(x)[:4], 0.5)
    return self.a(x) * self.queue.norm()


@trap(TRAINED)
def weight_clamped_in_forward(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.a.weight.clamp_(-0.1, 0.1)
    return self.a(x)


@trap(TRAINED)
def weight_data_normalised(self: Any, x: Tensor) -> Tensor:
    self.a.weight.data = F.normalize(self.a.weight.data, dim=1)
    return self.a(x)


@trap()
def unsaved_buffer(self: Any, x: Tensor) -> Tensor:
    self.unsaved.mul_(0.9)
    return self.a(x) * self.unsaved


@trap()
def view_of_a_buffer(self: Any, x: Tensor) -> Tensor:
    row = self.queue[1]
    row += x[0]
    return self.a(x) + self.queue.sum(0)


@trap()
def buffer_swapped_with_another(self: Any, x: Tensor) -> Tensor:
    old = self.unsaved.clone()
    self.unsaved.copy_(self.queue[0] + 1)
    self.queue[0] = old
    return self.a(x) * self.unsaved


@trap()
def norm_called_twice(self: Any, x: Tensor) -> Tensor:
    return self.norm(self.a(self.norm(x)))


@trap()
def norm_left_in_evaluation(self: Any, x: Tensor) -> Tensor:
    return self.norm.eval()(self.a(x)) if not self.training else self.norm(self.a(x))


@trap()
def cumulative_norm(self: Any, x: Tensor) -> Tensor:
    self.norm.momentum = None
    return self.norm(self.a(x))


@trap()
def renormalised_embedding(self: Any, x: Tensor) -> Tensor:
    index = (x[:, 0] > 0).long()
    return self.a(x) + F.embedding(index, self.a.weight, max_norm=0.5)


@trap()
def tied_in_forward(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.a(x), self.a.weight.t(), self.b.bias)


@trap()
def parameters_stacked(self: Any, x: Tensor) -> Tensor:
    from torch.func import functional_call, stack_module_state

    parameters, buffers = stack_module_state(list(self.layers))
    shape = [self.layers[0]]
    return torch.func.vmap(lambda p, b: functional_call(shape[0], (p, b), (x,)))(
        parameters, buffers
    ).mean(0)


@trap()
def gradient_in_forward(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.a(at).square().sum(), at, create_graph=True)
    return slope


@trap()
def inner_update(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        weight = self.a.weight * 1
        (slope,) = torch.autograd.grad(
            F.linear(x, weight).square().mean(), weight, create_graph=True
        )
    return F.linear(x, weight - 0.1 * slope)


# State in Python: numbers, lists, closures, modules of Python. Refused, unless it cannot be told.


@trap(STATE)
def python_count(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.a(x) * self.calls


@trap(STATE)
def first_call(self: Any, x: Tensor) -> Tensor:
    first, self.calls = self.calls == 0, 1
    return self.a(x) if first else self.b(x)


@trap(STATE)
def even_calls(self: Any, x: Tensor) -> Tensor:
    self.calls = 1 - self.calls
    return self.layers[self.calls](x)


@trap(STATE)
def tensor_kept(self: Any, x: Tensor) -> Tensor:
    y = self.a(x) if self.kept is None else self.a(x) + self.kept
    self.kept = y.detach()
    return y


@trap(STATE)
def tensors_listed(self: Any, x: Tensor) -> Tensor:
    self.past.append(x.mean())
    return self.a(x) * len(self.past)


@trap(STATE)
def tensors_in_a_deque(self: Any, x: Tensor) -> Tensor:
    self.past = collections.deque([*self.past, x.detach()], maxlen=2)
    return self.a(sum(self.past))


@trap(STATE)
def dictionary_by_shape(self: Any, x: Tensor) -> Tensor:
    mean = self.table.setdefault(tuple(x.shape), x.mean())
    return self.a(x) - mean


@trap(STATE)
def plain_tensor_in_place(self: Any, x: Tensor) -> Tensor:
    self.plain.add_(1)
    return self.a(x) * self.plain


@trap(STATE)
def plain_tensor_replaced(self: Any, x: Tensor) -> Tensor:
    self.plain = self.plain * 0.9
    return self.a(x) * self.plain


@trap(STATE)
def array_in_place(self: Any, x: Tensor) -> Tensor:
    self.array += 1
    return self.a(x) * float(self.array[0])


@trap(STATE)
def array_behind_a_tensor(self: Any, x: Tensor) -> Tensor:
    self.array += 1
    return self.a(x) * torch.from_numpy(self.array).to(x.dtype)


@trap(STATE)
def next_number(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * next(self.numbers)


SEEN: list[int] = []
SETTINGS = {"scale": 1.0}
LOCAL = threading.local()
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)


@trap(STATE)
def listed_globally(self: Any, x: Tensor) -> Tensor:
    SEEN.append(1)
    return self.a(x) * len(SEEN)


@trap(STATE)
def dictionary_of_the_file(self: Any, x: Tensor) -> Tensor:
    SETTINGS["scale"] *= 0.5
    return self.a(x) * SETTINGS["scale"]


@trap(STATE)
def local_of_a_thread(self: Any, x: Tensor) -> Tensor:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
    return self.a(x) * LOCAL.calls


@trap(STATE)
def variable_of_a_context(self: Any, x: Tensor) -> Tensor:
    CONTEXT.set(CONTEXT.get() + 1)
    return self.a(x) * CONTEXT.get()


@trap(STATE)
def attribute_of_the_class(self: Any, x: Tensor) -> Tensor:
    Parts.shared = getattr(Parts, "shared", 0) + 1
    return self.a(x) * Parts.shared


@trap(STATE)
def attribute_of_a_function(self: Any, x: Tensor) -> Tensor:
    attribute_of_a_function.calls = getattr(attribute_of_a_function, "calls", 0) + 1
    return self.a(x) * attribute_of_a_function.calls


def counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


COUNT = counter()


@trap(STATE)
def closure(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * COUNT()


def default(self: Any, x: Tensor, past: list[int] = []) -> Tensor:  # noqa: B006  that is the trap
    past.append(1)
    return self.a(x) * len(past)


trap(STATE)(default)


def forever() -> Any:
    number = 1.0
    while True:
        yield number
        number *= 0.5


GENERATED = forever()


@trap(STATE)
def generator(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * next(GENERATED)


@functools.cache
def remembered_scale(length: int) -> Tensor:
    return torch.full((length,), 1.0 + len(SEEN))


@trap()
def cached_constant(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * remembered_scale(8)


@trap(STATE)
def environment(self: Any, x: Tensor) -> Tensor:
    os.environ["TRAP"] = str(int(os.environ.get("TRAP", "0")) + 1)
    return self.a(x) * int(os.environ["TRAP"])


@trap(STATE)
def object_attribute(self: Any, x: Tensor) -> Tensor:
    self.kept = self.kept or types.SimpleNamespace(calls=0)
    self.kept.calls += 1
    return self.a(x) * self.kept.calls


@trap(STATE)
def weak_reference(self: Any, x: Tensor) -> Tensor:
    alive = self.kept is not None and self.kept() is not None
    self.table["held"] = x
    self.kept = weakref.ref(x)
    return self.a(x) * (2.0 if alive else 1.0)


@trap("the time of day is no input")
def clock(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * (time.perf_counter_ns() % 1000)


@trap(CHANCE)
def random_of_python(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * random.random()


@trap(CHANCE)
def random_of_numpy(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * float(np.random.rand())  # noqa: NPY002


@trap(CHANCE)
def own_generator(self: Any, x: Tensor) -> Tensor:
    self.kept = self.kept or np.random.default_rng(0)
    return self.a(x) * float(self.kept.random())


@trap(CHANCE)
def own_torch_generator(self: Any, x: Tensor) -> Tensor:
    return self.a(x) + torch.randn(8, generator=torch.Generator().manual_seed(3))


@trap(CHANCE)
def seeded(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return self.a(x) + torch.randn(8)


@trap(CHANCE)
def permuted_by_numpy(self: Any, x: Tensor) -> Tensor:
    return self.a(x)[torch.from_numpy(np.random.permutation(6))]  # noqa: NPY002


# The module itself changes from step to step.


@trap(STATE)
def modules_swapped(self: Any, x: Tensor) -> Tensor:
    self.a, self.b = self.b, self.a
    return self.a(x)


@trap(STATE)
def module_added(self: Any, x: Tensor) -> Tensor:
    self.layers.append(nn.Tanh())
    return self.layers[len(self.layers) - 1](self.a(x)) * len(self.layers)


@trap(STATE)
def mode_changed(self: Any, x: Tensor) -> Tensor:
    y = self.norm(self.a(x))
    self.norm.train(not self.norm.training)
    return y


@trap(STATE)
def hook_added(self: Any, x: Tensor) -> Tensor:
    self.a.register_forward_hook(lambda module, inputs, output: output * 2)
    return self.a(x)


@trap(STATE)
def frozen_after_the_first_step(self: Any, x: Tensor) -> Tensor:
    y = self.a(x) + self.b(x)
    self.b.requires_grad_(False)
    return y


@trap(STATE)
def late_buffer(self: Any, x: Tensor) -> Tensor:
    self.late = x.mean(0) if self.late is None else self.late * 0.5
    return self.a(x) - self.late


@trap(STATE)
def parameter_replaced(self: Any, x: Tensor) -> Tensor:
    self.scale = nn.Parameter(self.scale.detach() * 0.5)
    return self.a(x) * self.scale


@trap(STATE)
def copy_of_itself(self: Any, x: Tensor) -> Tensor:
    if "copy" not in self.table:
        self.table["copy"] = copy.deepcopy(self.a)
    return self.a(x) - self.table["copy"](x)


@trap(STATE)
def attribute_of_a_layer(self: Any, x: Tensor) -> Tensor:
    self.a.temperature = getattr(self.a, "temperature", 1.0) * 0.5
    return self.a(x) * self.a.temperature


@trap(STATE)
def forward_replaced(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    self.a.forward = lambda z: F.linear(z, self.b.weight)
    return y


@trap(STATE)
def gradients_read(self: Any, x: Tensor) -> Tensor:
    scale = 1.0 if self.scale.grad is None else 0.5
    return self.a(x) * self.scale * scale


# Data that decides.


@trap(DATA)
def branch_on_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.whole += 1
    return self.a(x) if self.whole > 1 else self.b(x)


@trap(DATA)
def number_of_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return self.a(x) * self.count.item()


@trap(DATA)
def number_of_a_parameter(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * float(self.scale.mean())


@trap(DATA)
def list_of_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.whole += 1
    return self.a(x) * self.whole.tolist()


@trap(DATA)
def array_of_an_input(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * float(x.detach().numpy().mean())


@trap(DATA)
def length_of_a_mask(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * x[x > 0].mean()


@trap(DATA)
def text_of_a_tensor(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * len(str(x.detach().mean()))


@trap(DATA)
def sorted_by_values(self: Any, x: Tensor) -> Tensor:
    return self.a(torch.stack(sorted(x, key=lambda row: float(row.sum().detach()))))


@trap(DATA)
def equal_tensors(self: Any, x: Tensor) -> Tensor:
    return self.a(x) if torch.equal(x, x.abs()) else self.b(x)


@trap(DATA)
def loop_until_small(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    while y.abs().max() > 0.5:
        y = y * 0.5
    return y
