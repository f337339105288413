"""Fused updates compute what torch.optim's single-tensor functions do, but for rounding."""

from dataclasses import asdict

import pytest
import torch

from dovetail.frontends import SGD, Adam, AdamW, RMSProp
from dovetail.frontends.optimizers import fused_update, update_adam

OPTIMIZERS = {
    "sgd": SGD(lr=0.1),
    "sgd with decay": SGD(lr=0.1, weight_decay=0.05),
    "momentum": SGD(lr=0.1, momentum=0.9, weight_decay=0.05),
    "nesterov": SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": Adam(lr=0.01),
    "adam with decay": Adam(lr=0.01, weight_decay=0.05, beta1=0.8),
    "adamw": AdamW(lr=0.01, weight_decay=0.05),
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
    fused = fused_update(optimizer.update)
    for own, other in zip(
        stepped(fused, optimizer, gradients, torch.float64, *layouts), wanted, strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)
        assert own.stride() == other.stride()


@pytest.mark.parametrize("name", OPTIMIZERS)
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
    own = stepped(fused_update(optimizer.update), optimizer, gradients, torch.float32)
    assert torch.equal(own[0], parameter.detach())


def test_16_bits_and_mixed_dtypes_are_left_to_the_single_tensor_functions(gradients):
    optimizer = OPTIMIZERS["adam"]
    for dtype in (torch.bfloat16, torch.float16):
        wanted = stepped(update_adam, optimizer, gradients, dtype)
        own = stepped(fused_update(update_adam), optimizer, gradients, dtype)
        assert all(torch.equal(a, b) for a, b in zip(own, wanted, strict=True))


def test_rmsprop_has_no_fused_form():
    assert fused_update(RMSProp().update) is None
