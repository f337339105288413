import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dovetail as dt
from dovetail.errors import ExportError, UsageError
from tests.support.places import On, spread
from tests.support.planned import Blocks, blocks_step, captured, plan_of
from tests.support.transformer_models import LentTable

PLACES = {"p100:0": "meta:0", "p100:1": "meta:1", "haswell": "cpu"}


def on_three(module, _name):
    """The first blocks on a GPU, the third block on another, the head on the CPU."""
    return 1 if module.startswith("blocks.3") else 2 if module.startswith("head") else 0


def on_two(module, _name):
    return int(module.startswith(("blocks.3", "head")))


def numbers(tensor):
    return tensor.held if isinstance(tensor, On) else tensor


def trained(model, inputs, steps=4, make=None):
    """Losses of some steps, and the parameters after them."""
    torch.manual_seed(1)
    make = make or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False))
    optimizer = make(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(numbers(loss.detach()).item())
    return losses, [numbers(p.detach()).clone() for p in model.parameters()]


def test_every_module_computes_where_the_plan_says_and_its_output_stays_there(monkeypatch):
    module, inputs, step = blocks_step()
    expected = module(inputs)
    log = spread(monkeypatch)
    dispatched = dt.dispatch(module, plan_of(step, on_three), devices=PLACES)
    assert dispatched is module
    homes = {name: str(p.device) for name, p in module.named_parameters()}
    assert homes["embedding.weight"] == homes["blocks.2.0.bias"] == "meta:0"
    assert homes["blocks.3.0.weight"] == "meta:1"
    assert homes["head.weight"] == "cpu"
    del log[:]
    found = module(inputs)
    assert found.device.type == "cpu"
    assert torch.equal(found, expected)
    computed = [(op, place) for op, place in log if op in ("addmm", "send")]
    sends = [("send", "meta:0"), ("send", "meta:1")]
    # Four products on the first device, one on the second, and that of the head on neither: the CPU
    # computes it.
    assert computed == [sends[0]] + [("addmm", "meta:0")] * 4 + [sends[1], ("addmm", "meta:1")]


def test_several_forward_calls_and_training_steps_equal_the_plain_model(monkeypatch):
    module, inputs, step = blocks_step()
    plain = copy.deepcopy(module)
    expected, weights = trained(plain, inputs)
    spread(monkeypatch)
    dt.dispatch(module, plan_of(step, on_three), devices=PLACES)
    found, after = trained(module, inputs)
    assert found == expected
    assert all(map(torch.equal, after, weights))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(module(inputs), plain(inputs))


def test_the_plan_of_a_training_step_dispatches_too(monkeypatch):
    torch.manual_seed(0)
    module, inputs = Blocks(), torch.randn(4, 8)
    targets = torch.randint(0, 3, (4,))
    step = dt.capture(module, inputs, targets=targets, loss=nn.functional.cross_entropy,
                      train=dt.SGD(0.1))  # fmt: skip
    spread(monkeypatch)
    plan = plan_of(step, on_two)
    assert "loss" not in dt.device_map(plan)
    dt.dispatch(module, plan, devices=PLACES)
    assert str(module(inputs).device) == "meta:1"


class Tied(nn.Module):
    """A head that has the weight of the embedding, and buffers that the middle writes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(6, 6, bias=False)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.middle(self.embedding(x)))


def tied_step():
    torch.manual_seed(0)
    module, inputs = Tied(), torch.randn(5, 6)
    return module, inputs, captured(module, inputs)


def test_a_weight_tied_across_devices_stays_one_parameter_in_training(monkeypatch):
    module, inputs, step = tied_step()
    expected, weights = trained(copy.deepcopy(module), inputs)
    spread(monkeypatch)
    dt.dispatch(module, plan_of(step, lambda path, _: int(path != "embedding")), devices=PLACES)
    assert module.head.weight is module.embedding.weight
    assert str(module.head.weight.device) == "meta:0"
    found, after = trained(module, inputs)
    assert found == expected
    assert all(map(torch.equal, after, weights))
    assert "weight" not in vars(module.head)


def test_a_part_that_is_lent_a_weight_of_another_device_stays_whole():
    torch.manual_seed(0)
    module, tokens = LentTable(), torch.arange(8)[None]
    step = captured(module, tokens)
    plan = plan_of(step, lambda path, _: int(path.startswith("head")))
    expected = module(tokens)
    dispatched = dt.dispatch(module, plan, devices={"p100:0": "cpu", "p100:1": "cpu"})
    assert dispatched.hf_device_map == {"embedding": "cpu", "head": "cpu"}
    assert torch.equal(dispatched(tokens), expected)


def test_a_device_map_refuses_a_weight_tied_across_devices():
    _, _, step = tied_step()
    plan = plan_of(step, lambda path, _: int(path != "embedding"))
    with pytest.raises(ExportError, match="'embedding' on p100:0 and read by 'head' on p100:1"):
        dt.device_map(plan)


def test_a_weight_that_is_tied_on_one_device_stays_tied(monkeypatch):
    module, inputs, step = tied_step()
    spread(monkeypatch)
    dt.dispatch(module, plan_of(step, lambda path, _: int(path.startswith("middle"))),
                devices=PLACES)  # fmt: skip
    assert module.head.weight is module.embedding.weight
    module(inputs)
    assert not any(isinstance(m.__dict__.get("weight"), torch.Tensor) for m in module.modules())


class Reader(nn.Module):
    """Layers that all read one side input, which one of them may write in between."""

    def __init__(self, writes=False):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Adding() for _ in range(3))
        self.writes = writes

    def forward(self, x, *, side, flag=True, nothing=None):
        side = {"by": [self.first(side), nothing]}
        for layer in self.layers:
            x = layer(x, side=side, flag=flag)
            if self.writes:
                with torch.no_grad():
                    side["by"][0].add_(1)
        return x


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, *, side, flag):
        return self.inner(x) + side["by"][0] if flag else x


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_a_tensor_is_sent_once_to_a_device_unless_it_is_written(monkeypatch, writes, inference):
    torch.manual_seed(0)
    module = Reader(writes)
    x, side = torch.randn(2, 4), torch.randn(2, 4)
    with torch.no_grad():
        expected = module(x, side=side)
    log = spread(monkeypatch)
    dt.dispatch(module, {"first": "cpu", "layers": "meta:1"})
    del log[:]
    with torch.inference_mode(inference), torch.no_grad():
        found = module(x, side=side)
    assert torch.equal(found.held, expected)
    # Of x there is one send. Tensors of inference mode count no versions, and are sent anew.
    sends = log.count(("send", "meta:1")) - 1
    assert sends == (3 if writes or inference else 1)


def test_checkpointing_sends_anew_with_gradients(monkeypatch):
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            inner = self.a(x)
            again = checkpoint(lambda z: self.b(z).sin(), inner, use_reentrant=True)
            return again + self.b(inner)

    torch.manual_seed(0)
    module, inputs = Recomputed(), torch.randn(3, 4)
    expected, weights = trained(copy.deepcopy(module), inputs)
    spread(monkeypatch)
    dt.dispatch(module, {"a": "cpu", "b": "meta:1"})
    found, after = trained(module, inputs)
    assert found == pytest.approx(expected, rel=1e-6)
    assert all(map(torch.allclose, after, weights))


def test_undispatch_takes_every_hook_away_and_dispatching_again_replaces_them(monkeypatch):
    module, inputs, step = blocks_step()
    expected = module(inputs)
    before = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in module.modules()]
    spread(monkeypatch)
    dt.dispatch(module, plan_of(step, on_two), devices=dict.fromkeys(PLACES, "cpu"))
    assert module.hf_device_map["head"] == "cpu"
    dt.dispatch(module, plan_of(step, lambda *_: 1), devices=PLACES)
    assert module.hf_device_map == {"": "meta:1"}
    assert torch.equal(module(inputs).held, expected)
    assert dt.undispatch(module) is module
    after = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in module.modules()]
    assert after == before
    assert not hasattr(module, "hf_device_map")
    assert torch.equal(module(On(inputs, "meta:1")).held, expected)


def test_a_failing_forward_leaves_nothing_lent_behind(monkeypatch):
    module, inputs, step = tied_step()
    spread(monkeypatch)
    dt.dispatch(module, plan_of(step, lambda path, _: int(path != "embedding")), devices=PLACES)
    with pytest.raises(RuntimeError):
        module.head(torch.zeros(2, 7))
    assert "weight" not in vars(module.head)
    with pytest.raises(RuntimeError):
        module(torch.zeros(2, 7))
    assert module(inputs).shape == (5, 6)


def test_a_dispatched_model_can_be_copied_and_the_copy_computes_too():
    module, inputs, step = blocks_step()
    every = dict.fromkeys(PLACES, "cpu")
    twin = copy.deepcopy(dt.dispatch(module, plan_of(step, on_two), devices=every))
    assert torch.equal(twin(inputs), module(inputs))


def test_an_op_between_modules_that_reads_from_two_devices_is_refused():
    module, _, step = blocks_step()
    plan = plan_of(step, lambda path, _: int(path.startswith("blocks.2")))
    with pytest.raises(ExportError, match=r"p100:0 and p100:1.*pin"):
        dt.dispatch(module, plan, devices=PLACES)


def test_a_gpu_that_is_not_there_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    module, _, step = blocks_step()
    with pytest.raises(UsageError, match=r"cuda:1, for p100:1, is not there.*1 GPUs; say with"):
        dt.dispatch(module, plan_of(step, lambda path, _: int(path == "head")))
    with pytest.raises(UsageError, match="does not say which torch device p100:1 is"):
        dt.dispatch(module, plan_of(step, on_two), devices={"p100:0": "cpu"})
    with pytest.raises(UsageError, match="'gpu seven'"):
        dt.dispatch(module, {"": "gpu seven"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "empty device map"),
        ({"embedding": "cpu"}, "'blocks.0.0.weight'"),
        ({"": "cpu", "tail": "cpu"}, "'tail', which the model does not have"),
    ],
)
def test_a_map_that_does_not_fit_the_model_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        dt.dispatch(Blocks(), given)


def test_weights_on_the_meta_device_are_refused():
    with torch.device("meta"):
        module = Blocks()
    with pytest.raises(UsageError, match=r"'embedding\.weight' on the meta device; load"):
        dt.dispatch(module, {"": "cpu"})


def test_a_module_with_two_paths_is_on_one_device():
    shared = nn.Linear(2, 2)
    with pytest.raises(ExportError, match="module '1' is '0' as well"):
        dt.dispatch(nn.Sequential(shared, shared), {"0": "cpu", "1": "meta"})


def test_a_plan_from_a_file_has_the_graph_or_needs_it(tmp_path):
    module, inputs, step = blocks_step()
    plan_of(step, on_two).save(tmp_path / "plan.json")
    loaded = dt.load_plan(tmp_path / "plan.json")
    every = dict.fromkeys(PLACES, "cpu")
    dt.dispatch(module, loaded, devices=every)
    dt.undispatch(module)
    loaded = replace(loaded, graph=None)
    with pytest.raises(ExportError, match="give the graph as well, or open it with open_plan"):
        dt.dispatch(module, loaded)
    dt.dispatch(module, loaded, step.graph, devices=every)
    assert module(inputs).shape == (4, 3)


def test_a_model_of_transformers_generates_the_same_tokens_with_its_cache_in_place(monkeypatch):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, attn_implementation="eager",
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(1, 64, (2, 8))
    with torch.no_grad():
        expected = model(tokens).logits
    generated = model.generate(tokens, max_new_tokens=4, do_sample=False)
    parts = ("embed_tokens", "rotary_emb", *(f"layers.{i}" for i in range(3)), "norm")
    homes = {f"model.{part}": "cpu" for part in parts} | {"lm_head": "cpu"}
    dt.dispatch(model, homes)
    assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), generated)
    spread(monkeypatch)
    behind = dict.fromkeys(("model.layers.1", "model.layers.2", "model.norm", "lm_head"), "meta:1")
    dt.dispatch(model, homes | behind)
    with torch.no_grad():
        found = model(tokens, use_cache=False).logits
    assert torch.equal(found.held, expected)
