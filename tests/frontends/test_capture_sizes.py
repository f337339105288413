"""FLOPs and bytes of networks at the sizes of their papers, against closed forms."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dovetail.frontends import capture, matrix_flops, parse_optimizer, resolve
from dovetail.graph import Phase
from dovetail.networks import NETWORKS


def by_name(graph):
    """source op -> bytes of its tensor."""
    return {
        graph.names[op]: int(graph.tensor_bytes[graph.outputs_of(op)[0]])
        for op in range(len(graph))
        if graph.is_source[op]
    }


def assert_accounted(graph, module, optimizer, states):
    """Every parameter's bytes, gradient and state."""
    sizes = by_name(graph)
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        size = parameter.numel() * 4
        assert sizes[name] == size
        update = graph.index[f"{name}/{optimizer}"]
        reads = graph.inputs_of(update).tolist()
        gradient = reads[1]
        assert graph.phases[graph.producers[gradient]] == Phase.BACKWARD
        assert graph.tensor_bytes[gradient] == size
        for state in states:
            assert sizes[f"{name}/{state}"] == size
        scalar = 4 * (len(reads) - 2 - len(states))
        assert graph.accessed_bytes[update] == size * (3 + 2 * len(states)) + 2 * scalar
    updates = int(sum(kind == f"dovetail.{optimizer}" for kind in graph.kinds))
    assert updates == len(parameters)


@pytest.fixture(scope="module")
def big_rnnlm(tmp_path_factory):
    """(graph, peak bytes of the process that captured it).

    `getrusage` would count what the process that started it holds: its peak survives `exec`.
    """
    path = tmp_path_factory.mktemp("rnnlm") / "graph.pickle"
    script = (
        "import pickle, re, sys\n"
        "from dovetail.frontends import Adam, resolve\n"
        "graph = resolve('zoo:rnnlm', train=Adam()).graph\n"
        "status = open('/proc/self/status').read()\n"
        "peak_bytes = 1024 * int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1])\n"
        "pickle.dump((graph, peak_bytes), open(sys.argv[1], 'wb'))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    return pickle.loads(path.read_bytes())


def test_capturing_the_big_rnnlm_takes_less_than_2_gb(big_rnnlm):
    graph, peak_bytes = big_rnnlm
    assert len(graph) > 3000
    assert peak_bytes < 2e9


def test_rnnlm_of_the_papers_size_counts_as_its_closed_form(big_rnnlm):
    graph, _ = big_rnnlm
    steps, batch, layers, hidden, vocabulary = 40, 64, 2, 2048, 10_000
    cell = 2 * batch * (hidden + hidden) * 4 * hidden
    softmax = 2 * batch * hidden * vocabulary
    forward = steps * (layers * cell + softmax)
    assert matrix_flops(graph) == pytest.approx(3 * forward, rel=0.01)
    with FakeTensorMode():
        module, *_ = NETWORKS["rnnlm"].build()
    assert_accounted(graph, module, "adam", ["exp_avg", "exp_avg_sq"])


def test_inception_v3_at_batch_32_counts_as_the_sum_of_its_layers():
    captured = resolve("zoo:inception_v3", train=parse_optimizer("rmsprop"))
    layers = []

    def formula(module, inputs, output):
        if isinstance(module, nn.Conv2d):
            height, width = module.kernel_size
            layers.append(2 * output.numel() * module.in_channels * height * width)
        else:
            layers.append(2 * output.numel() * module.in_features)

    with FakeTensorMode():
        module, images, _, _ = NETWORKS["inception_v3"].build(batch=32)
        for layer in module.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.register_forward_hook(formula)
        module(*images)
    assert len(layers) == 95
    # Images need no gradient, so the first layer has no backward pass to its input.
    assert matrix_flops(captured.graph) == pytest.approx(3 * sum(layers) - layers[0], rel=0.01)
    assert_accounted(captured.graph, captured.module, "rmsprop", ["square_avg"])


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda a, b: a @ b, [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (lambda a, b: a @ b, [(2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
        (lambda a, b: a @ b, [(3, 4), (4,)], 2 * 3 * 4),
        (lambda a, b: a @ b, [(4,), (4,)], 2 * 4),
        (nn.functional.conv2d, [(2, 3, 8, 8), (5, 3, 3, 3)], 2 * 2 * 5 * 6 * 6 * 3 * 3 * 3),
        (
            nn.functional.scaled_dot_product_attention,
            [(2, 4, 6, 8), (2, 4, 7, 8), (2, 4, 7, 8)],
            2 * 2 * (2 * 4 * 6 * 7 * 8),
        ),
        (lambda a: a.tanh(), [(3, 4)], 12),
        (lambda a, b: a + b, [(3, 4), (4,)], 12),
        (lambda a: a.sum(), [(3, 4)], 12),
        (lambda a: torch.softmax(a, 1), [(3, 4)], 12),
        (lambda a: a.t(), [(3, 4)], 0),
        (lambda a: torch.cat([a, a]), [(3, 4)], 0),
    ],
)
def test_flops_follow_the_formula(function, shapes, expected):
    class Module(nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    graph = capture(Module(), *[torch.randn(shape) for shape in shapes]).graph
    assert int(graph.flops.sum()) == expected


def test_a_view_accesses_nothing_and_a_lookup_only_its_rows():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1000, 8)

        def forward(self, tokens):
            return self.table(tokens).view(-1)

    graph = capture(Lookup(), torch.zeros(5, dtype=torch.int64)).graph
    view, lookup = graph.index["view"], graph.index["table/embedding"]
    assert graph.accessed_bytes[view] == 0
    assert graph.accessed_bytes[lookup] == 2 * (5 * 8 * 4) + 5 * 8
