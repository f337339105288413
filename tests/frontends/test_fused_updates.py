"""Fused updates compute what torch.optim's single-tensor functions do, but for rounding."""

from dataclasses import asdict, replace

import pytest
import torch

from dovetail.frontends import SGD, Adam, AdamW, RMSProp
from dovetail.frontends.fused_updates import fused_updates, has_fused_kernel
from dovetail.frontends.optimizers import update_adam
from dovetail.frontends.program import Call, Ref

OPTIMIZERS = {
    "sgd": SGD(lr=0.1),
    "sgd with decay": SGD(lr=0.1, weight_decay=0.05),
    "momentum": SGD(lr=0.1, momentum=0.9, weight_decay=0.05),
    "nesterov": SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": Adam(lr=0.01),
    "adam with decay": Adam(lr=0.01, weight_decay=0.05, beta1=0.8),
    "adamw": AdamW(lr=0.01, weight_decay=0.05),
    "rmsprop": RMSProp(lr=0.01),
    "rmsprop with decay": RMSProp(lr=0.01, alpha=0.9, weight_decay=0.05),
    "rmsprop with momentum": RMSProp(lr=0.01, alpha=0.9, momentum=0.9),
    "rmsprop centered": RMSProp(lr=0.01, centered=True),
    "rmsprop with all": RMSProp(lr=0.01, weight_decay=0.05, momentum=0.9, centered=True),
}
LAYOUTS = {
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x),
}


def stepped(run, optimizer, gradients, dtype, parameter_layout="rows", gradient_layout="rows"):
    """The parameter and its states after these gradients."""
    parameter = LAYOUTS[parameter_layout](torch.linspace(-1, 1, 12, dtype=dtype).reshape(3, 4))
    states = [
        torch.full((), state.fill) if state.scalar else torch.full_like(parameter, state.fill)
        for state in optimizer.states
    ]
    options = asdict(optimizer)
    for gradient in gradients:
        run(parameter, LAYOUTS[gradient_layout](gradient.to(dtype)), *states, **options)
    return [parameter, *states]


def fused(update, number_of_states):
    """The fused form of the update of one parameter, as a function like the update itself."""
    made = {}

    def run(parameter, gradient, *states, **options):
        if not made:
            refs = tuple(map(Ref, range(2 + number_of_states)))
            results = (0, *range(2, 2 + number_of_states))
            made["call"] = fused_updates([Call(update, refs, options, results, in_place=True)])
        return made["call"].target(parameter, gradient, *states)

    return run


@pytest.fixture
def gradients():
    torch.manual_seed(0)
    return [torch.randn(3, 4, dtype=torch.float64) for _ in range(6)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("parameter_layout", "gradient_layout"),
    [("rows", "rows"), ("rows", "columns"), ("columns", "rows"), ("columns", "columns"),
     ("rows", "with gaps"), ("with gaps", "rows"), ("rows", "expanded")],
)  # fmt: skip
def test_steps_equal_the_single_tensor_functions(
    name, parameter_layout, gradient_layout, gradients
):
    optimizer = OPTIMIZERS[name]
    layouts = parameter_layout, gradient_layout
    wanted = stepped(optimizer.update, optimizer, gradients, torch.float64, *layouts)
    run = fused(optimizer.update, len(optimizer.states))
    for own, other in zip(
        stepped(run, optimizer, gradients, torch.float64, *layouts), wanted, strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)
        assert own.stride() == other.stride()


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "rmsprop" not in name])
def test_float32_equals_torchs_own_fused_optimizer_bit_for_bit(name, gradients):
    optimizer = OPTIMIZERS[name]
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
    options = asdict(optimizer)
    if "beta1" in options:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    kind = {SGD: torch.optim.SGD, Adam: torch.optim.Adam, AdamW: torch.optim.AdamW}
    plain = kind[type(optimizer)]([parameter], fused=True, **options)
    for gradient in gradients:
        parameter.grad = gradient.float()
        plain.step()
    run = fused(optimizer.update, len(optimizer.states))
    own = stepped(run, optimizer, gradients, torch.float32)
    assert torch.equal(own[0], parameter.detach())


def test_16_bits_and_mixed_dtypes_are_left_to_the_single_tensor_functions(gradients):
    optimizer = OPTIMIZERS["adam"]
    for dtype in (torch.bfloat16, torch.float16):
        wanted = stepped(update_adam, optimizer, gradients, dtype)
        own = stepped(fused(update_adam, 3), optimizer, gradients, dtype)
        assert all(torch.equal(a, b) for a, b in zip(own, wanted, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_many_updates_by_one_call_equal_each_by_itself(name, gradients):
    """Of parameters of two types, layouts and settings, one of which no fused kernel takes."""
    optimizer = OPTIMIZERS[name]
    slower = replace(optimizer, lr=optimizer.lr / 2)
    shapes = [(3, 4), (12,), (2, 6), (12, 1), (1, 12), (4, 3)]
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float32, torch.float64,
              torch.bfloat16]  # fmt: skip
    kinds = [optimizer, optimizer, slower, optimizer, slower, optimizer]
    count = 2 + len(optimizer.states)

    def fresh():
        made = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            parameter = torch.linspace(-1, 1, 12).to(dtype).reshape(shape)
            states = [
                torch.full((), s.fill) if s.scalar else torch.full_like(parameter, s.fill)
                for s in optimizer.states
            ]
            made.append([parameter, torch.empty_like(parameter), *states])
        return made

    alone, together = fresh(), fresh()
    calls = [
        Call(
            kind.update,
            tuple(map(Ref, range(first, first + count))),
            asdict(kind),
            (first, *range(first + 2, first + count)),
            in_place=True,
        )
        for first, kind in zip(range(0, count * len(kinds), count), kinds, strict=True)
    ]
    call = fused_updates(calls)
    for gradient in gradients:
        for group in (alone, together):
            for tensors in group:
                tensors[1].copy_(gradient.reshape(tensors[1].shape))
        for kind, tensors in zip(kinds, alone, strict=True):
            kind.update(*tensors, **asdict(kind))
        returned = call.target(*(t for tensors in together for t in tensors))
        written = [t for parameter, _, *states in together for t in (parameter, *states)]
        assert list(map(id, returned)) == list(map(id, written))
    for own, wanted in zip(together, alone, strict=True):
        for one, other in zip(own, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    assert call.results == tuple(result for one in calls for result in one.results)


@pytest.mark.parametrize("name", ["rmsprop", "rmsprop with momentum", "rmsprop centered", "adam"])
def test_a_parameter_that_is_infinite_stays_so(name):
    optimizer = OPTIMIZERS[name]
    parameter = torch.tensor([0.5, -torch.inf])
    states = [
        torch.full((), s.fill) if s.scalar else torch.full_like(parameter, s.fill)
        for s in optimizer.states
    ]
    run = fused(optimizer.update, len(states))
    run(parameter, torch.tensor([0.3, 0.0]), *states, **asdict(optimizer))
    assert parameter[0].isfinite() and parameter[1] == -torch.inf


def test_only_updates_of_optimizers_have_fused_kernels():
    assert all(has_fused_kernel(optimizer.update) for optimizer in OPTIMIZERS.values())
    assert not has_fused_kernel(torch.relu)
