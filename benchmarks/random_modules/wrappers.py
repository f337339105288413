"""The inner nodes of random modules: what is done with modules that map [ROWS, WIDTH] to itself.

A wrapper is a class made with its children, a list of modules.
"""

import copy
import functools

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .parts import WIDTH, weights

WRAPPERS = {}  # name -> (children) -> nn.Module
FAMILIES = {}  # family -> names


def wrapper(family):
    """Register a class as a wrapper of the family."""

    def register(given):
        name = given.__name__.lower().replace("_", "-")
        assert name not in WRAPPERS, name
        WRAPPERS[name] = given
        FAMILIES.setdefault(family, []).append(name)
        return given

    return register


class Wrapper(nn.Module):
    def __init__(self, children):
        super().__init__()
        self.parts = nn.ModuleList(children)

    def inner(self, x):
        for part in self.parts:
            x = part(x)
        return x


@wrapper("plain")
class Seq(nn.Sequential):
    def __init__(self, children):
        super().__init__(*children)


@wrapper("plain")
class Residual(Wrapper):
    def forward(self, x):
        return x + self.inner(x)


@wrapper("plain")
class Gated(Wrapper):
    def forward(self, x):
        return self.parts[0](x) * torch.sigmoid(sum(part(x) for part in self.parts))


@wrapper("plain")
class Halved(Wrapper):
    """Children see their input through a view of a larger tensor, in its other layout."""

    def forward(self, x):
        larger = torch.cat([x, x.tanh()]).t().contiguous()
        return self.inner(larger.t()[: len(x)])


# Shared and tied ---------------------------------------------------------------------------------


@wrapper("shared")
class Twice(Wrapper):
    def forward(self, x):
        return self.inner(self.inner(x).tanh())


@wrapper("shared")
class Around(Wrapper):
    """The first child before and after the others."""

    def forward(self, x):
        return self.parts[0](self.inner(x))


@wrapper("shared")
class Looped(Wrapper):
    def forward(self, x):
        for _ in range(3):
            x = self.inner(x).tanh()
        return x


@wrapper("shared")
class Two_Names(Wrapper):
    """Modules that are registered twice."""

    def __init__(self, children):
        super().__init__(children)
        self.same = nn.ModuleDict({str(i): part for i, part in enumerate(children)})

    def forward(self, x):
        for part in self.same.values():
            x = part(x)
        return x


@wrapper("shared")
class Tied(Wrapper):
    """All parameters of one shape are one parameter, whatever modules they are of."""

    def __init__(self, children):
        super().__init__(children)
        first = {}
        for module in list(self.modules()):
            if "parametrizations" in module._modules:
                continue
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = first.setdefault(parameter.shape, parameter)

    forward = Wrapper.inner


@wrapper("shared")
class Copied(Wrapper):
    def __init__(self, children):
        super().__init__(children)
        self.copies = nn.ModuleList(map(copy.deepcopy, children))

    def forward(self, x):
        for part in self.copies:
            x = part(x)
        return x + self.inner(x)


# Checkpointing -----------------------------------------------------------------------------------


@wrapper("checkpointing")
class Checkpoint(Wrapper):
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@wrapper("checkpointing")
class Checkpoint_Reentrant(Wrapper):
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)


@wrapper("checkpointing")
class Checkpoint_Closure(Wrapper):
    """A lambda that reads parameters and calls modules."""

    def __init__(self, children):
        super().__init__(children)
        self.weight = weights(WIDTH, WIDTH)

    def forward(self, x):
        weight = self.weight
        return checkpoint(lambda z: (self.inner(z) @ weight).sin(), x, use_reentrant=False)


@wrapper("checkpointing")
class Checkpoint_Closure_Reentrant(Checkpoint_Closure):
    def forward(self, x):
        weight = self.weight
        return checkpoint(lambda z: (self.inner(z) @ weight).sin(), x, use_reentrant=True)


@wrapper("checkpointing")
class Checkpoint_Of_Input(Wrapper):
    """A closure that reads an outer value, and writes over one of its own."""

    def forward(self, x):
        def run(z):
            y = self.inner(z) + 0
            y += x
            y[:, 0] = x[:, 1]
            return y

        return checkpoint(run, x.tanh(), use_reentrant=False)


@wrapper("checkpointing")
class Checkpoint_Buffer(Wrapper):
    """The recomputation reads a buffer after it was written."""

    def __init__(self, children):
        super().__init__(children)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        y = checkpoint(lambda z: (self.inner(z) * self.scale).sin(), x, use_reentrant=False)
        self.scale.mul_(0.9)
        return y


@wrapper("checkpointing")
class Checkpoint_Arguments(Checkpoint_Closure):
    """Parameters as arguments, other arguments that are no tensors."""

    def forward(self, x):
        def run(z, power, weight, *, again):
            return again(z) @ weight**power, None

        return checkpoint(run, x, 2, self.weight, again=self.inner, use_reentrant=False)[0]


@wrapper("checkpointing")
class Checkpoint_Loop(Wrapper):
    def forward(self, x):
        for _ in range(2):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False).tanh()
        return x


@wrapper("checkpointing")
class Checkpoint_Loop_Reentrant(Wrapper):
    def forward(self, x):
        for _ in range(2):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=True).tanh()
        return x


@wrapper("checkpointing")
class Checkpoint_Sequence(Wrapper):
    def forward(self, x):
        return checkpoint_sequential(list(self.parts), 2, x, use_reentrant=False)


@wrapper("checkpointing")
class Checkpoint_Nested(Wrapper):
    def forward(self, x):
        def outer(z):
            z = checkpoint(self.inner, z, use_reentrant=False).tanh()
            return checkpoint(torch.sin, z, use_reentrant=False)

        return checkpoint(outer, x, use_reentrant=False)


@wrapper("checkpointing")
class Checkpoint_Whole(Wrapper):
    """Without stopping once all is recomputed."""

    def forward(self, x):
        with checkpointing.set_checkpoint_early_stop(False):
            return checkpoint(self.inner, x, use_reentrant=False)


@wrapper("checkpointing")
class Checkpoint_Selective(Wrapper):
    """Products are kept, the rest is recomputed.

    Those of `addmm` are not kept: in recurrent cells PyTorch itself then computes wrong gradients
    (2.13), as the cell writes over the product that was kept for it.
    """

    def forward(self, x):
        kept = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
        contexts = functools.partial(checkpointing.create_selective_checkpoint_contexts, kept)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)


@wrapper("checkpointing")
class Checkpoint_Fresh_Draws(Wrapper):
    """Random ops draw anew when they are recomputed."""

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)


# Around what autograd does -----------------------------------------------------------------------


@wrapper("hooks around")
class Packed(Wrapper):
    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(),), lambda p: p[0]):
            return self.inner(x)


@wrapper("hooks around")
class Held_Elsewhere(Wrapper):
    """Saved tensors are kept in a list; the graph has numbers only."""

    def forward(self, x):
        kept = []

        def pack(tensor):
            kept.append(tensor)
            return len(kept) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: kept[i]):
            return self.inner(x)


@wrapper("hooks around")
class On_Cpu(Wrapper):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return self.inner(x)


@wrapper("hooks around")
class Hooked(Wrapper):
    def __init__(self, children):
        super().__init__(children)
        for part in self.parts:
            part.register_forward_pre_hook(lambda module, given: (given[0] * 0.9,))
            part.register_forward_hook(lambda module, given, out: out + 0.1 * given[0])
            part.register_full_backward_hook(
                lambda module, gi, go: (None if gi[0] is None else gi[0] * 0.8,)
            )

    forward = Wrapper.inner


@wrapper("hooks around")
class Parameters_Hooked(Wrapper):
    """Each parameter's gradient is halved by a hook."""

    def __init__(self, children):
        super().__init__(children)
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * 0.5)

    forward = Wrapper.inner


@wrapper("hooks around")
class Ungraded(Wrapper):
    def forward(self, x):
        with torch.no_grad():
            y = self.inner(x)
        return x + y


@wrapper("hooks around")
class Frozen(Wrapper):
    def __init__(self, children):
        super().__init__(children)
        self.requires_grad_(False)

    forward = Wrapper.inner


@wrapper("hooks around")
class In_Evaluation(Wrapper):
    def train(self, mode=True):
        return super().train(False)

    forward = Wrapper.inner


# Parametrized as a whole -------------------------------------------------------------------------


class Parametrized(Wrapper):
    def __init__(self, children):
        super().__init__(children)
        for module in list(self.modules()):
            plain = type(module).__bases__[0] is nn.Linear or type(module) is nn.Linear
            if (
                plain
                and "parametrizations" not in module._modules
                and "weight" in module._parameters
            ):
                self.parametrize(module)

    forward = Wrapper.inner


@wrapper("parametrized around")
class All_Weight_Normed(Parametrized):
    parametrize = staticmethod(parametrizations.weight_norm)


@wrapper("parametrized around")
class All_Spectral_Normed(Parametrized):
    parametrize = staticmethod(parametrizations.spectral_norm)


@wrapper("parametrized around")
class All_Orthogonal(Parametrized):
    parametrize = staticmethod(parametrizations.orthogonal)
