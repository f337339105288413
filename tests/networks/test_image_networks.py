"""The networks of images and sound: their sizes in the literature, their structure, captures."""

import random
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from dovetail.errors import ModelError
from dovetail.frontends import SGD, matrix_flops, resolve
from dovetail.networks import NETWORKS
from dovetail.networks.amoebanet import NORMAL, NORMAL_CONCAT, REDUCTION, REDUCTION_CONCAT
from dovetail.networks.images import FactorizedReduce
from dovetail.networks.randwire import RandWireNode, WiredNodes, watts_strogatz
from dovetail.networks.wavenet import FirstConv

NAMES = [
    "squeezenet_1_0", "squeezenet_1_1", "nasnet_a_large", "nasnet_a_mobile", "amoebanet_d",
    "wavenet", "randwire", "vit",
]  # fmt: skip


@cache
def weightless(name, **options):
    with torch.device("meta"):
        return NETWORKS[name].modules(**(NETWORKS[name].defaults | options))


def parameters(name, **options):
    return sum(p.numel() for p in weightless(name, **options).parameters())


def small(name, **options):
    torch.manual_seed(0)
    return NETWORKS[name].build(**(NETWORKS[name].small | options))


def text(name, **options):
    return f"zoo:{name}?" + "&".join(f"{k}={v}" for k, v in options.items())


@cache
def multiply_adds(name, **options):
    return matrix_flops(resolve(text(name, batch=1, **options)).graph) / 2


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("squeezenet_1_0", 1_248_424),
        ("squeezenet_1_1", 1_235_496),
        ("nasnet_a_large", 88_753_150),
        ("nasnet_a_mobile", 5_289_978),
        ("vit", 86_567_656),
    ],
)
def test_parameters_are_those_of_the_literature(name, count):
    assert parameters(name) == count


@pytest.mark.parametrize(
    ("name", "count"), [("nasnet_a_large", 88_949_818), ("nasnet_a_mobile", 5_326_716)]
)
def test_nasnet_has_the_papers_parameters_where_moving_averages_count(name, count):
    buffers = weightless(name).named_buffers()
    averages = sum(value.numel() for key, value in buffers if "running" in key)
    assert parameters(name) + averages == count


@pytest.mark.parametrize(
    ("layers", "filters", "torchgpipe", "last_digit", "gpipe"),
    [
        (18, 208, 81.5e6, 1e5, 82e6),
        (18, 416, 319.0e6, 1e5, 318e6),
        (18, 544, 542.7e6, 1e5, 542e6),
        (36, 544, 1.06e9, 1e7, 1.05e9),
        (72, 512, 1.84e9, 1e7, 1.8e9),
    ],
)
def test_amoebanet_d_has_the_parameters_of_gpipe(layers, filters, torchgpipe, last_digit, gpipe):
    count = parameters("amoebanet_d", layers=layers, filters=filters)
    assert count == pytest.approx(torchgpipe, abs=last_digit / 2)
    assert count == pytest.approx(gpipe, rel=0.025)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 5.6e6),
        ({"channels": 109, "regular": True}, 31.9e6),
        ({"channels": 154, "regular": True}, 61.5e6),
    ],
)
def test_randwire_has_the_papers_parameters_on_average(options, count):
    counts = [parameters("randwire", seed=seed, **options) for seed in range(1, 9)]
    assert np.mean(counts) == pytest.approx(count, rel=0.025)
    assert len(set(counts)) > 1


@pytest.mark.parametrize(
    ("name", "count", "tolerance"),
    [
        ("inception_v3", 5.7e9, 0.01),
        ("squeezenet_1_0", 0.82e9, 0.01),
        ("squeezenet_1_1", 0.35e9, 0.01),
        ("nasnet_a_large", 23.8e9, 0.005),
        ("nasnet_a_mobile", 564e6, 0.005),
        ("randwire", 583e6, 0.02),
        ("vit", 17.56e9, 0.001),
    ],
)
def test_multiply_adds_are_those_of_the_literature(name, count, tolerance):
    assert multiply_adds(name) == pytest.approx(count, rel=tolerance)


def test_squeezenet_1_1_needs_2_4_times_fewer_multiply_adds():
    ratio = multiply_adds("squeezenet_1_0") / multiply_adds("squeezenet_1_1")
    assert ratio == pytest.approx(2.4, abs=0.06)


def test_wavenet_has_the_size_of_its_formula():
    residual = gated = 64
    skip = classes = 256
    layers = 2 * 18
    conv = 2 * residual * 2 * gated + 2 * gated
    onward = gated * residual + residual
    across = gated * skip + skip
    output = skip * skip + skip + skip * classes + classes
    expected = 2 * classes * residual + layers * (conv + across) + (layers - 1) * onward + output
    assert parameters("wavenet") == expected
    length = NETWORKS["wavenet"].defaults["length"]
    per_sample = (
        layers * (2 * residual * 2 * gated + gated * skip) + (layers - 1) * gated * residual
    )
    assert multiply_adds("wavenet") == length * (per_sample + 2 * skip * skip)


@pytest.mark.parametrize("name", NAMES)
def test_a_small_inference_is_finite_and_has_its_shape(name):
    module, inputs, _, targets = small(name)
    options = NETWORKS[name].defaults | NETWORKS[name].small
    with torch.no_grad():
        logits = module.eval()(*inputs)
    assert torch.isfinite(logits).all()
    assert logits.shape == (options["batch"], options["classes"], *targets[0].shape[1:])


@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_moves_every_parameter_and_lowers_the_loss(name):
    options = {"dropout": 0.0} if "dropout" in NETWORKS[name].defaults else {}
    module, inputs, loss, targets = small(name, **options)
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    before = loss(module(*inputs), *targets)
    before.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())
    optimizer.step()
    with torch.no_grad():
        assert loss(module(*inputs), *targets) < before


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, {}) for name in NAMES if not name.startswith("nasnet")),
        ("nasnet_a_mobile", {"size": 67, "aux": True}),  # the large one is of the same cells
    ],
)
def test_small_captures_are_finite_and_training_costs_more(name, more):
    model = text(name, **NETWORKS[name].small | more)
    inference, training = resolve(model).graph, resolve(model, train=SGD(0.1)).graph
    assert 0 < inference.flops.sum() < training.flops.sum()
    assert 0 < len(inference.kinds) < len(training.kinds)
    for graph in (inference, training):
        assert np.isfinite(graph.flops).all()
        assert (graph.flops >= 0).all()
    assert matrix_flops(training) > 2 * matrix_flops(inference)


def grids(name, blocks, size):
    """[channels, n] of what the blocks return, in the order in which they do."""
    module, seen = weightless(name), []
    hooks = [
        block.register_forward_hook(lambda m, i, output: seen.append(tuple(output.shape[1:3])))
        for block in blocks(module)
    ]
    module.eval()(torch.empty(2, 3, size, size, device="meta"))
    for hook in hooks:
        hook.remove()
    return seen


def test_squeezenet_doubles_what_each_fire_expands_to():
    fires = lambda module: [m for m in module.features if hasattr(m, "squeeze")]  # noqa: E731
    assert grids("squeezenet_1_0", fires, 224) == [
        (128, 54), (128, 54), (256, 54), (256, 27), (384, 27), (384, 27), (512, 27), (512, 13),
    ]  # fmt: skip
    assert grids("squeezenet_1_1", fires, 224) == [
        (128, 55), (128, 55), (256, 27), (256, 27), (384, 13), (384, 13), (512, 13), (512, 13),
    ]  # fmt: skip


def test_nasnet_widens_where_it_halves_its_grid():
    def blocks(module):
        cells = [stage[-1] for stage in module.stages]
        return [*module.stem_cells, *module.reductions, *cells]

    assert sorted(grids("nasnet_a_large", blocks, 331)) == sorted(
        [(168, 83), (336, 42), (1008, 42), (1344, 21), (2016, 21), (2688, 11), (4032, 11)]
    )
    assert sorted(grids("nasnet_a_mobile", blocks, 224)) == sorted(
        [(44, 56), (88, 28), (264, 28), (352, 14), (528, 14), (704, 7), (1056, 7)]
    )


@pytest.mark.parametrize(("skip", "position"), [(True, -2), (False, -1)])
def test_nasnet_reads_the_cell_before_a_reduction_or_the_one_before_that(skip, position):
    module, images, _, _ = small("nasnet_a_large", cells=2, skip=skip)
    seen = {}
    for name, cell in (("read", module.stages[1][0]), ("made", module.stages[0][position])):
        cell.register_forward_hook(lambda m, i, output, name=name: seen.update({name: (i, output)}))
    module.eval()(*images)
    (before, _), _ = seen["read"]
    assert before is seen["made"][1]


def test_the_auxiliary_classifier_of_nasnet_speaks_in_training_only():
    options = {"size": 67, "aux": True, "dropout": 0.0}
    module, images, loss, (targets,) = small("nasnet_a_mobile", **options)
    logits, auxiliary = module.train()(*images)
    assert auxiliary.shape == logits.shape == module.eval()(*images).shape
    expected = F.cross_entropy(logits, targets) + 0.4 * F.cross_entropy(auxiliary, targets)
    assert torch.equal(loss((logits, auxiliary), targets), expected)


def test_a_factorized_reduction_reads_every_pixel_of_one_parity():
    reduce = FactorizedReduce(1, 2).eval()
    with torch.no_grad():
        reduce.even.weight.fill_(1)
        reduce.odd.weight.fill_(1)
        image = torch.arange(25.0).reshape(1, 1, 5, 5)
        even, odd = reduce(image)[0] * (1 + reduce.bn.eps) ** 0.5
    assert torch.allclose(even, image[0, 0, ::2, ::2])
    assert torch.allclose(odd[:2, :2], image[0, 0, 1::2, 1::2])
    assert not odd[2].any()
    assert not odd[:, 2].any()


def test_amoebanet_d_reads_and_hands_on_every_state():
    for pairs, concat in ((NORMAL, NORMAL_CONCAT), (REDUCTION, REDUCTION_CONCAT)):
        read = {state for left, _, right, _ in pairs for state in (left, right)}
        assert read | set(concat) == set(range(7))
        for made, (left, _, right, _) in enumerate(pairs, 2):
            assert max(left, right) < made


def test_amoebanet_d_widens_where_it_halves_its_grid():
    picked = [0, 1, 2, 7, 8, 9, 14, 15, 16, 21]
    blocks = lambda module: [module.cells[n] for n in picked]  # noqa: E731
    assert grids("amoebanet_d", blocks, 224) == [
        (312, 56), (624, 28), (832, 28), (832, 28), (1248, 14), (1664, 14), (1664, 14), (2496, 7),
        (3328, 7), (3328, 7),
    ]  # fmt: skip


@pytest.mark.parametrize("size", [33, 47, 64])
def test_amoebanet_d_takes_images_of_any_size(size):
    with FakeTensorMode():
        module, images, _, _ = NETWORKS["amoebanet_d"].build(
            layers=3, filters=32, size=size, classes=7, batch=2
        )
        assert module.eval()(*images).shape == (2, 7)


@pytest.mark.parametrize(
    "model",
    [
        "amoebanet_d?layers=4",
        "amoebanet_d?filters=20",
        "nasnet_a_large?filters=100",
        "nasnet_a_mobile?aux=true&size=64",
        "randwire?neighbours=3",
        "randwire?nodes=4",
        "vit?size=225",
        "vit?heads=7",
    ],
)
def test_sizes_that_do_not_fit_are_an_error_that_names_the_model(model):
    with pytest.raises(ModelError, match="must be") as raised:
        resolve(f"zoo:{model}")
    assert model in str(raised.value)


def predictions(module, samples):
    with torch.no_grad():
        return module.eval()(samples)


def test_wavenet_hears_its_receptive_field_and_nothing_later():
    module, (samples,), _, _ = small("wavenet")
    field = module.receptive_field
    assert field == 2 + 2 * (1 + 2 + 4)
    plain = predictions(module, samples)
    for position in (5, 15):
        changed = samples.clone()
        changed[:, position] = (changed[:, position] + 1) % 16
        differs = (predictions(module, changed) != plain).any(dim=1).any(dim=0)
        heard = differs.nonzero().flatten().tolist()
        assert heard[0] == position
        assert heard[-1] == position + field - 1


def test_the_dilations_of_wavenet_double_and_begin_again():
    module = weightless("wavenet", stacks=2, layers=18)
    dilations = [[layer.dilation for layer in stack.layers] for stack in module.stacks]
    assert dilations == [[1, 2, 4, 8, 16, 32, 64, 128, 256] * 2] * 2
    module = weightless("wavenet", stacks=4, layers=36)
    assert [len(stack.layers) for stack in module.stacks] == [36] * 4
    assert module.receptive_field == 2 + 4 * 4 * 511


def test_the_first_convolution_of_wavenet_is_that_of_one_hot_samples():
    torch.manual_seed(0)
    first = FirstConv(6, 5)
    samples = torch.randint(6, (2, 9))
    weight = torch.stack([first.before.weight.T, first.here.weight.T], dim=2)
    one_hot = F.pad(F.one_hot(samples, 6).float().transpose(1, 2), (1, 0))
    assert torch.allclose(first(samples), F.conv1d(one_hot, weight), atol=1e-6)


def test_wavenet_is_asked_for_the_next_sample():
    _, (samples,), _, (targets,) = small("wavenet")
    assert torch.equal(samples[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("seed", range(5))
def test_a_watts_strogatz_graph_keeps_its_edges_and_points_up(seed):
    edges = watts_strogatz(32, 4, 0.75, random.Random(seed))
    assert len(edges) == len(set(edges)) == 32 * 4 // 2
    assert edges == sorted(edges)
    assert all(0 <= v < w < 32 for v, w in edges)


def test_without_rewiring_the_graph_is_the_ring():
    edges = watts_strogatz(6, 4, 0.0, random.Random(0))
    assert edges == [
        (0, 1), (0, 2), (0, 4), (0, 5), (1, 2), (1, 3), (1, 5), (2, 3), (2, 4), (3, 4), (3, 5),
        (4, 5),
    ]  # fmt: skip


def test_three_quarters_of_the_edges_are_rewired():
    # An edge of the ring stays with probability 1/4, or is joined anew, which is rare in 400 nodes.
    ring = set(watts_strogatz(400, 4, 0.0, random.Random(0)))
    edges = watts_strogatz(400, 4, 0.75, random.Random(1))
    assert len(ring & set(edges)) / len(edges) == pytest.approx(0.25, abs=0.05)


def test_rewiring_keeps_the_near_end_of_every_edge():
    for seed in range(5):
        edges = watts_strogatz(16, 4, 1.0, random.Random(seed))
        degrees = np.bincount(np.array(edges).ravel(), minlength=16)
        assert degrees.min() >= 2  # K / 2 edges of one's own


def wiring(seed):
    module = weightless("randwire", seed=seed, nodes=16, channels=4)
    return [stage.reads for stage in module.stages]


def test_randwire_is_the_same_for_the_same_seed_and_another_for_another():
    assert wiring(3) == wiring(3)
    assert wiring(3) != wiring(4)
    first, second, third = wiring(3)
    assert first != second != third


def test_a_stage_averages_the_nodes_that_no_other_reads():
    torch.manual_seed(0)
    #  input ─► 0 ─┬─► 1 ─► 3
    #              └─► 2 ─┘
    #  input ─► 4
    stage = WiredNodes(5, [(0, 1), (0, 2), (1, 3), (2, 3)], 3, 6).eval()
    for parameter in stage.parameters():
        nn.init.normal_(parameter)

    def run(n, x, stride=1):
        node = stage.nodes[n]
        y = F.conv2d(F.relu(x), node.depthwise.weight, None, stride, 1, groups=x.shape[1])
        return node.bn(F.conv2d(y, node.pointwise.weight))

    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        first, other = run(0, x, 2), run(4, x, 2)
        left, right = run(1, first), run(2, first)
        weights = torch.sigmoid(stage.nodes[3].weights)
        third = run(3, weights[0] * left + weights[1] * right)
        assert torch.allclose(stage(x), (third + other) / 2, atol=1e-6)
    assert stage.nodes[1].weights is None


def test_the_weight_of_a_single_input_would_not_matter():
    torch.manual_seed(0)
    node = RandWireNode(1, 4, 4).double()
    x = torch.randn(4, 4, 8, 8, dtype=torch.double)
    node.bn.eps = 1e-12
    assert torch.allclose(node(x), node(0.5 * x), atol=1e-6)


def test_vit_equals_torchs_encoder():
    module, (images,), _, _ = small("vit")
    encoder = nn.TransformerEncoderLayer(
        16, 2, 32, 0.0, "gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    )
    with torch.no_grad():
        x = F.conv2d(images, module.patches.weight, module.patches.bias, 8)
        assert x.shape == (2, 16, 4, 4)
        x = torch.cat([module.class_token.expand(2, 1, 16), x.flatten(2).mT], 1) + module.positions
        for layer in module.layers:
            both = layer.attention
            encoder.load_state_dict({
                "self_attn.in_proj_weight": both.query_key_value.weight,
                "self_attn.in_proj_bias": both.query_key_value.bias,
                "self_attn.out_proj.weight": both.output.weight,
                "self_attn.out_proj.bias": both.output.bias,
                "linear1.weight": layer.feed_forward[0].weight,
                "linear1.bias": layer.feed_forward[0].bias,
                "linear2.weight": layer.feed_forward[3].weight,
                "linear2.bias": layer.feed_forward[3].bias,
                "norm1.weight": layer.attention_norm.weight,
                "norm1.bias": layer.attention_norm.bias,
                "norm2.weight": layer.feed_forward_norm.weight,
                "norm2.bias": layer.feed_forward_norm.bias,
            })  # fmt: skip
            x = encoder(x)
        expected = module.linear(module.norm(x)[:, 0])
        assert torch.allclose(module(images), expected, atol=1e-5)
