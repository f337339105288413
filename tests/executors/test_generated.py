"""Code that Inductor generated, run by a runner's instructions."""

import ctypes
from types import ModuleType

import pytest
import torch

from dovetail.executors.generated import GeneratedCode, noted
from dovetail.frontends.instructions import CheckLayout, RunKernel, RunOp
from dovetail.frontends.program import Call
from dovetail.frontends.runners import PythonRunner
from dovetail.runtime.native import has_compiler
from dovetail.runtime.torch_versions import inductor_source

aten = torch.ops.aten
X, W = torch.randn(4, 8), torch.randn(8, 8)


def module_of(source):
    module = ModuleType("generated")
    exec(source, module.__dict__)
    return module


def by_hand(body, **names):
    """A module whose `call` has that body, as Inductor writes it."""
    module = module_of(
        "import torch\n"
        "from torch._inductor.select_algorithm import extern_kernels\n"
        "assert_size_stride = torch._C._dynamo.guards.assert_size_stride\n"
        "empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu\n"
        "reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor\n"
        "def call(args):\n    x, w = args\n    args.clear()\n"
        + "".join(f"    {line}\n" for line in body.splitlines())
    )
    module.__dict__.update(names)
    return module


PRODUCT = """assert_size_stride(x, (4, 8), (8, 1))
buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
extern_kernels.mm(x, reinterpret_tensor(w, (8, 8), (1, 8), 0), out=buf0)
buf1 = buf0; del buf0
return (buf1, )"""


def results(code, *tensors):
    runner, run = code.bound(tensors)
    run()
    return [runner.get(len(tensors) + number) for number in range(len(code.outputs))]


@pytest.fixture(params=["native", "python"], autouse=True)
def kind(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr("dovetail.executors.generated.make_runner", PythonRunner)
    elif not has_compiler():
        pytest.skip("there is no C++ compiler")


def test_what_code_does_is_noted_as_instructions():
    code = noted(by_hand(PRODUCT), (X, W))
    kinds = [type(done) for done in code.instructions]
    assert kinds == [CheckLayout, RunOp, RunOp, RunOp]
    targets = [done.call.target for done in code.instructions[1:]]
    assert targets == [
        aten.empty_strided.default, torch.ops.inductor._reinterpret_tensor.default, aten.mm.out
    ]  # fmt: skip
    assert code.temporary_count(2) == 1  # the view
    for _ in range(2):
        x, w = torch.randn(4, 8), torch.randn(8, 8)
        (made,) = results(code, x, w)
        assert torch.equal(made, x @ w.t())


def test_a_view_counts_from_where_its_tensor_begins():
    code = noted(by_hand(PRODUCT), (X, W))
    wide = torch.randn(3, 8, 8)
    assert torch.equal(results(code, X, wide[2])[0], X @ wide[2].t())


def test_an_input_of_another_layout_is_refused():
    code = noted(by_hand(PRODUCT), (X, W))
    for other in (torch.randn(8, 4).t(), torch.randn(4, 9)[:, :8], torch.randn(5, 8)):
        with pytest.raises(RuntimeError, match=r"made for sizes \[4, 8\] and strides \[8, 1\]"):
            results(code, other, W)


def test_strides_of_single_rows_do_not_count():
    body = PRODUCT.replace("(4, 8)", "(1, 8)")
    code = noted(by_hand(body), (X[:1], W))
    row = torch.randn(1, 8).as_strided((1, 8), (99, 1))
    assert torch.equal(results(code, row, W)[0], row @ W.t())


@pytest.mark.parametrize(
    "body",
    [
        "return (x, )",  # an output is an argument
        "y = torch.ops.aten.neg.default(x)\nreturn (y, y)",
        "return (torch.ops.aten.mul.Tensor(x, constant0), )",
        "return (torch.ops.aten.mul.Tensor(x, x.sum().item()), )",
        "buf = empty_strided_cuda(x)\nreturn (x + 1, )",
        "buf = alloc_from_pool(x)\nreturn (x + 1, )",
        "y = x + 1\ncpp_fused_0(y, 4)\nreturn (y, )",
        "y = x + 1\ncpp_fused_1(y)\nreturn (y, )",
    ],
)
def test_code_that_does_anything_else_is_called_from_python(body):
    names = {
        "constant0": torch.tensor(3.0),
        "empty_strided_cuda": lambda _: None,
        "alloc_from_pool": lambda _: None,
        "cpp_fused_0": lambda *_: None,
        "cpp_fused_1": lambda _: None,
    }
    module = by_hand(body, **names)
    code = noted(module, (X, W))
    assert code.instructions is None
    given = torch.randn(4, 8)
    wanted = module.call([given, W])
    for made, value in zip(results(code, given, W), wanted, strict=True):
        assert torch.equal(made, value)
    # Nothing is left in place of what the module calls.
    assert module.cpp_fused_0 is names["cpp_fused_0"]


def test_code_that_raises_is_told_as_it_is():
    with pytest.raises(ZeroDivisionError):
        noted(by_hand("return (1 // 0, )"), (X, W))
    with pytest.raises(TypeError):
        noted(module_of("call = None"), (X, W))


@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
def test_kernels_of_inductor_are_called_by_their_address(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(aten.mm.default, (x, w))
    graph.output((graph.call_function(aten.tanh.default, (product,)), product))
    source = inductor_source(torch.fx.GraphModule(torch.nn.Module(), graph), (X, W))
    code = noted(module_of(source), (X, W))
    kernels = [done for done in code.instructions if isinstance(done, RunKernel)]
    assert len(kernels) == 1
    given = torch.randn(4, 8)
    made, wanted = results(code, given, W), code(given, W)
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
    assert torch.allclose(made[0], (given @ W).tanh())


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
def double(source, target):
    """target[0] = 2 * source[0]"""
    values = (ctypes.c_float * 1).from_address(source)
    (ctypes.c_float * 1).from_address(target)[0] = 2 * values[0]


def test_an_entry_that_a_kernel_writes_over_may_be_an_output():
    address = ctypes.cast(double, ctypes.c_void_p).value
    empty = Call(aten.empty_strided.default, ([1], [1]), {"dtype": torch.float32}, (2,))
    done = (RunOp(0, (), empty), RunKernel(0, address, (0, 2)), RunKernel(0, address, (2, 2)))
    code = GeneratedCode(None, done, (2,), 3)
    (made,) = results(code, torch.tensor([3.0]), W)
    assert made.tolist() == [12.0]
