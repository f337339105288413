import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dovetail.errors import ModelError, UnknownNetworkError
from dovetail.frontends import Adam, resolve
from dovetail.frontends.models import describe_network, network_rows
from dovetail.networks import NETWORKS
from dovetail.networks.records import load_sizes


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("aux", "count"), [(False, 23_834_568), (True, 27_161_264)])
def test_inception_v3_has_the_parameters_of_the_literature(aux, count):
    with FakeTensorMode():
        module, images, loss, targets = NETWORKS["inception_v3"].build(aux=aux)
        assert loss(module.train()(*images), *targets).shape == ()
    assert parameters(module) == count


def test_inception_v3_narrows_its_grids_as_the_paper_does():
    sizes = []
    with FakeTensorMode():
        module, images, _, _ = NETWORKS["inception_v3"].build(batch=2)
        for block in (*module.blocks, *module.tail):
            block.register_forward_hook(lambda m, i, output: sizes.append(tuple(output.shape)))
        assert module(*images).shape == (2, 1000)
    assert [size[1:] for size in sizes] == [
        (256, 35, 35), (288, 35, 35), (288, 35, 35), (768, 17, 17), (768, 17, 17), (768, 17, 17),
        (768, 17, 17), (768, 17, 17), (1280, 8, 8), (2048, 8, 8), (2048, 8, 8),
    ]  # fmt: skip


def test_the_auxiliary_classifier_speaks_in_training_only():
    with FakeTensorMode():
        module, images, _, _ = NETWORKS["inception_v3"].build(aux=True, width=0.1, batch=2)
        assert len(module.train()(*images)) == 2
        assert module.eval()(*images).shape == (2, 1000)


def test_rnnlm_equals_a_stack_of_torch_lstms():
    torch.manual_seed(0)
    options = {"layers": 2, "hidden": 5, "steps": 4, "batch": 3, "vocabulary": 11}
    module, (tokens,), _, _ = NETWORKS["rnnlm"].build(**options)
    lstm = nn.LSTM(5, 5, num_layers=2)
    with torch.no_grad():
        for layer, cell in enumerate(module.lstm):
            getattr(lstm, f"weight_ih_l{layer}").copy_(cell.weight_x.T)
            getattr(lstm, f"weight_hh_l{layer}").copy_(cell.weight_h.T)
            getattr(lstm, f"bias_ih_l{layer}").copy_(cell.bias)
            getattr(lstm, f"bias_hh_l{layer}").zero_()
        hidden, _ = lstm(module.embedding(tokens))
        expected = torch.log_softmax(hidden @ module.softmax.weight + module.softmax.bias, dim=-1)
        assert torch.allclose(torch.stack(module(tokens)), expected, atol=1e-6)


def test_rnnlm_loss_is_the_mean_cross_entropy():
    torch.manual_seed(0)
    module, (tokens,), loss, (targets,) = NETWORKS["rnnlm"].build(
        hidden=4, steps=3, batch=2, vocabulary=7
    )
    outputs = module(tokens)
    expected = nn.functional.nll_loss(torch.cat(outputs), targets.flatten())
    assert loss(outputs, targets).item() == pytest.approx(expected.item())


def test_rnnlm_has_the_size_of_its_formula():
    hidden, vocabulary = 2048, 10_000
    with FakeTensorMode():
        module, _, _, _ = NETWORKS["rnnlm"].build(steps=1)
    cell = 2 * hidden * 4 * hidden + 4 * hidden
    assert parameters(module) == 2 * vocabulary * hidden + vocabulary + 2 * cell


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_names_its_paper_and_its_options(name):
    network = NETWORKS[name]
    assert network.name == name
    assert "https://" in network.paper
    assert network.description
    assert "batch" in network.defaults


HOW = "is stale: run `python benchmarks/capture/run.py --write` for what changed"
QUICK = ("gpt2", "squeezenet_1_0", "two_tower")


def test_the_table_of_sizes_has_every_network():
    assert set(load_sizes()) == set(NETWORKS), f"sizes.json {HOW}"


@pytest.mark.parametrize("name", NETWORKS)
def test_the_table_of_sizes_has_the_parameters_of_the_modules(name):
    network, found = NETWORKS[name], load_sizes()[name]
    with FakeTensorMode():
        module = network.modules(**network.defaults)
    assert found.parameters == parameters(module), f"{name} {HOW}"
    assert found.parameter_bytes == sum(p.nbytes for p in module.parameters())
    assert 0 < found.ops < found.training_ops
    assert found.flops > 0


@pytest.mark.parametrize("name", QUICK)
def test_the_table_of_sizes_has_what_a_capture_finds(name):
    found, graph = load_sizes()[name], resolve(f"zoo:{name}").graph
    assert (found.flops, found.ops) == (graph.flops.sum(), (~graph.is_source).sum()), HOW
    step = resolve(f"zoo:{name}", train=Adam()).graph
    assert found.training_ops == (~step.is_source).sum(), HOW


def test_networks_are_listed_with_their_sizes_and_papers(monkeypatch):
    rows = {row["network"]: row for row in network_rows()}
    assert list(rows) == [f"zoo:{name}" for name in NETWORKS]
    assert rows["zoo:gpt2"]["parameters"] == 124_439_808
    assert rows["zoo:gpt2"]["batch"] == 8
    assert rows["zoo:rnnlm"]["paper"] == "Jozefowicz et al., 2016"
    monkeypatch.setattr("dovetail.frontends.models.load_sizes", dict)
    assert network_rows()[0]["ops"] == ""


@pytest.mark.parametrize("name", ["rnnlm", "zoo:rnnlm"])
def test_one_network_is_described_with_its_options(name):
    facts, options = describe_network(name)
    assert dict(facts)["network"] == "zoo:rnnlm"
    assert "https://" in dict(facts)["paper"]
    assert options == NETWORKS["rnnlm"].defaults


def test_a_network_that_is_not_there_or_has_options_is_not_described():
    with pytest.raises(UnknownNetworkError) as unknown:
        describe_network("rnn")
    assert unknown.value.network == "rnn"
    with pytest.raises(ModelError, match="at the defaults"):
        describe_network("zoo:rnnlm?layers=4")
