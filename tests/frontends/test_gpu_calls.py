"""Calls as GPUs make them: what stands for kernels of CPUs gives their values in their layouts."""

import pytest
import torch

from dovetail.frontends import gpu_calls
from dovetail.frontends.gpu_calls import attention, attention_backward, on_gpu
from dovetail.frontends.program import Call, Ref

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
MASKS = (None, "bool", "float")
CASES = [(False, mask) for mask in MASKS] + [(True, None)]
"""The kernel is causal or takes a mask."""


def tensors(dtype=torch.float64):
    """Query, key and value as a network gives them: heads taken out of [batch, positions, all]."""
    torch.manual_seed(0)
    return [torch.randn(2, 5, 3 * 4, dtype=dtype).view(2, 5, 3, 4).transpose(1, 2) for _ in "qkv"]


def mask_of(kind):
    if kind is None:
        return None
    return torch.rand(5, 5) > 0.3 if kind == "bool" else torch.randn(5, 5, dtype=torch.float64)


@pytest.mark.parametrize(("causal", "mask"), CASES)
def test_attention_is_that_of_the_kernel_of_cpus(causal, mask):
    query, key, value = tensors()
    given = mask_of(mask)
    if mask == "bool":
        given = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~given, -torch.inf)
        given[:, 0] = 0.0  # each position sees one
    expected, sums = FORWARD(query, key, value, 0.0, causal, attn_mask=given)
    found, found_sums = attention(query, key, value, 0.0, causal, attn_mask=given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_sums, sums)
    grad = torch.randn_like(expected)
    of_cpu = BACKWARD(grad, query, key, value, expected, sums, 0.0, causal, attn_mask=given)
    ours = attention_backward(
        grad, query, key, value, found, found_sums, 0.0, causal, attn_mask=given
    )
    for one, other in zip(ours, of_cpu, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [40, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_gpus_attend_as_the_kernel_of_cpus(dtype, causal, rows):
    torch.manual_seed(0)
    given = [torch.randn(2, rows, 3, 16, dtype=dtype).transpose(1, 2) for _ in "qkvg"]
    *heads, grad = given
    expected, sums = FORWARD(*heads, 0.0, causal)
    of_cpu = BACKWARD(grad, *heads, expected, sums, 0.0, causal)
    *heads, grad = [tensor.cuda() for tensor in given]
    assert gpu_calls._has_kernel(*heads, None)
    found, found_sums = attention(*heads, 0.0, causal)
    ours = attention_backward(grad, *heads, found, found_sums, 0.0, causal)
    error = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for one, other in zip((found, found_sums, *ours), (expected, sums, *of_cpu), strict=True):
        torch.testing.assert_close(one.cpu(), other, **error)
        assert one.stride() == other.stride()


def test_layouts_are_those_of_the_graph():
    """A view that was recorded behind the kernel must be possible here too."""
    query, key, value = tensors()
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (query, key, value)]
        out, sums = FORWARD(*fakes, 0.0, True)
        grads = BACKWARD(out, *fakes, out, sums, 0.0, True)
    found, found_sums = attention(query, key, value, 0.0, True)
    assert (found.stride(), found_sums.stride()) == (out.stride(), sums.stride())
    ours = attention_backward(found, query, key, value, found, found_sums, 0.0, True)
    assert [g.stride() for g in ours] == [g.stride() for g in grads]
    assert found.transpose(1, 2).flatten(2).data_ptr() == found.data_ptr()


def test_a_position_that_sees_nothing_has_no_output():
    query, key, value = tensors()
    mask = torch.zeros(5, 5, dtype=torch.float64)
    mask[2] = -torch.inf
    found, sums = attention(query, key, value, attn_mask=mask)
    assert not found.isnan().any() and not found[:, :, 2].any()
    grads = attention_backward(
        torch.ones_like(found), query, key, value, found, sums, 0.0, False, attn_mask=mask
    )
    assert not any(grad.isnan().any() for grad in grads)


def test_calls_name_the_gpu_and_have_its_ops():
    gpu = torch.device("cuda", 1)
    made = Call(torch.ops.aten.zeros.default, ([2],), {"device": torch.device("cpu")})
    assert on_gpu(made, gpu).kwargs["device"] == gpu
    attends = Call(FORWARD, (Ref(0), Ref(1), Ref(2)), {})
    assert on_gpu(attends, gpu).target is gpu_calls.attention
    # A GPU that the CPU plays has the ops of CPUs.
    assert on_gpu(attends, torch.device("cpu")).target is FORWARD
