"""Phases of one model under one placement."""

import copy
import json
import signal

import numpy as np
import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.costs import analytic_costs
from dovetail.errors import ModelError, OutOfMemoryError, UsageError
from dovetail.frontends import resolve, resolve_phases
from dovetail.machine import parse_machine
from dovetail.pipeline import phases as phases_module
from dovetail.pipeline.opening import verify
from dovetail.plans import check

CARDS = "2 x k80 + haswell"
FEW = "200e"


class Summary(nn.Module):
    """An encoder that only `reading` runs, a body with a parameter of its own, and a tied head."""

    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.encoder = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        self.place = nn.Parameter(torch.randn(width))
        self.decoder = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, memory=None):
        x = self.embedding(tokens)
        if memory is None:
            memory = self.encoder(x).mean(1, keepdim=True)
        return self.head(self.decoder(x + memory + self.place)), memory


def summary(width=64):
    torch.manual_seed(0)
    return Summary(width).eval()


def two_phases(module=None):
    """The function that a MODEL text of these tests names."""
    module = module or summary()
    memory = torch.randn(4, 1, module.place.numel())
    return {
        "reading": (module, torch.arange(128).reshape(4, 32) % 50),
        "writing": (module, {"tokens": torch.ones(4, 1, dtype=torch.long), "memory": memory}),
    }


def captured(module=None):
    return {
        name: dt.capture(module, **inputs)
        if isinstance(inputs, dict)
        else dt.capture(module, inputs)
        for name, (module, inputs) in two_phases(module).items()
    }


def devices_of_parameters(plan):
    """Parameter -> names of the devices that hold it, of those that the phase reads."""
    graph, names = plan.graph, plan.machine.device_names
    found = {
        graph.names[op]: {names[plan.placement[r]] for t in graph.outputs_of(op)
                          for r in graph.consumers_of(t)}
        for op, kind in enumerate(graph.kinds) if kind == "parameter"
    }  # fmt: skip
    return {name: where for name, where in found.items() if where}


@pytest.fixture(scope="module")
def steps():
    return captured()


@pytest.fixture(scope="module")
def found(steps):
    apart = [("embedding", "k80:0"), ("decoder.1", "k80:1")]
    return dt.plan_phases(steps, CARDS, budget=FEW, pins=apart, weights={"writing": 50})


def test_parameters_live_on_the_same_devices_in_all_phases(found):
    reading, writing = (devices_of_parameters(plan) for plan in found.plans.values())
    assert writing.keys() < reading.keys()
    assert {name: reading[name] for name in writing} == writing
    assert set.union(*writing.values()) >= {"k80:0", "k80:1"}
    for name, where in reading.items():
        module = name.rpartition(".")[0]
        assert found.devices[module] in where


def test_plans_of_phases_keep_every_rule_and_promise(found, steps):
    for name, plan in found.plans.items():
        check(plan, steps[name].graph)
        verify(plan, steps[name].graph)


def test_the_sum_counts_how_often_each_phase_runs(found):
    reading, writing = found.plans["reading"], found.plans["writing"]
    assert found.weights == {"reading": 1, "writing": 50}
    assert found.value == pytest.approx(reading.value + 50 * writing.value)


def test_the_placement_is_no_worse_than_any_that_was_imposed_on_all_phases(steps):
    found = dt.plan_phases(steps, CARDS, budget=FEW, min_gain=0, weights={"writing": 3})
    assert set(found.candidates) == {
        "reading by itself", "writing by itself", "all on k80:0", "all on k80:1", "all on haswell",
        "moved together",
    }  # fmt: skip
    assert found.value <= min(v for v in found.candidates.values() if v is not None) * (1 + 1e-9)


def test_one_device_for_all_costs_what_plans_for_it_cost(steps, found):
    gpu = dt.plan_phases(steps, CARDS, budget=FEW, weights={"writing": 3}).candidates[
        "all on k80:0"
    ]
    alone = {
        name: dt.plan(step, CARDS, budget="1e", placer="single", pins=[("*", "k80:0")])
        for name, step in steps.items()
    }
    assert gpu == pytest.approx(alone["reading"].value + 3 * alone["writing"].value)


def test_a_budget_of_seconds_limits_the_seconds_of_searches_and_not_their_evaluations(
    steps, monkeypatch
):
    real, budgets = phases_module.run_placer, []

    def run_placer(problem, placer, budget, **options):
        budgets.append(budget)
        return real(problem, placer, budget, **options)

    monkeypatch.setattr(phases_module, "run_placer", run_placer)
    dt.plan_phases(steps, CARDS, budget="1s")
    assert {budget.evaluations for budget in budgets} == {np.inf}
    assert sum(budget.seconds for budget in budgets) == pytest.approx(0.7)


def test_weights_decide_between_what_suits_one_phase_and_what_suits_the_other(steps, monkeypatch):
    def costs(step, machine, *_):
        seconds = np.ones((len(step.graph), len(machine.devices)))
        seconds[:, 0 if step is steps["reading"] else 1] = 0.1
        seconds[step.graph.is_source] = 0.0
        return type(analytic_costs(step.graph, machine))(seconds, "given")

    monkeypatch.setattr(phases_module, "costs_of", costs)
    for weights, device in (({"reading": 100}, "k80:0"), ({"writing": 100}, "k80:1")):
        found = dt.plan_phases(steps, CARDS, budget=FEW, weights=weights)
        read_by_both = {k: d for k, d in found.devices.items() if not k.startswith("encoder")}
        assert set(read_by_both.values()) == {device}
        assert found.devices["encoder.1"] == "k80:0"  # which one phase alone reads


def test_memory_counts_parameters_that_only_another_phase_reads(steps):
    whole = dt.plan_phases(steps, CARDS, budget=FEW, pins=[("*", "k80:0")])
    writing = whole.plans["writing"]
    encoder = sum(p.numel() * 4 for p in summary().encoder.parameters())
    capacity = writing.machine.devices[0].memory_bytes
    assert dict(writing.caps)["k80:0"] == capacity - encoder
    peak = writing.peak_memory_bytes[0]
    fits = max(peak + encoder, whole.plans["reading"].peak_memory_bytes[0])
    dt.plan_phases(steps, CARDS, budget=FEW, pins=[("*", "k80:0")], caps=[("k80:0", fits)])
    with pytest.raises(OutOfMemoryError):
        dt.plan_phases(steps, CARDS, budget=FEW, pins=[("*", "k80:0")], caps=[("k80:0", fits - 1)])


class Tied(nn.Module):
    """A head that every phase runs, tied to an embedding that only the phase with tokens runs."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens=None, x=None):
        return self.head(self.embedding(tokens) if x is None else x)


def test_memory_counts_a_tied_parameter_once_on_a_device():
    module = Tied().eval()
    steps = {
        "reading": dt.capture(module, tokens=torch.ones(4, 8, dtype=torch.long)),
        "writing": dt.capture(module, x=torch.randn(4, 1, 16)),
    }
    found = dt.plan_phases(steps, CARDS, budget=FEW, pins=[("*", "k80:0")])
    assert found.plans["writing"].caps == ()  # the head reads there what the embedding would


def test_a_cache_goes_from_prefill_to_decode_and_numbers_equal_plain_ones(monkeypatch, here):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(
        phases_module, "costs_of", lambda step, machine, *_: analytic_costs(step.graph, machine)
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )
    ).eval()  # fmt: skip
    prompt, token = torch.arange(10).reshape(2, 5), torch.tensor([[7], [9]])
    with torch.no_grad():
        read = model(input_ids=prompt, use_cache=True)
        made = model(
            input_ids=token, past_key_values=copy.deepcopy(read.past_key_values), use_cache=True
        )
    past = copy.deepcopy(read.past_key_values)
    steps = {
        "prefill": dt.capture(model, input_ids=prompt, use_cache=True),
        "decode": dt.capture(model, input_ids=token, past_key_values=past, use_cache=True),
    }
    machine = parse_machine(here)
    last = machine.device_names[-1]
    pins = [("model.layers.0", machine.device_names[0]), ("model.layers.1", last)]
    found = dt.plan_phases(steps, machine, budget="50e", pins=pins)
    assert found.weights == {"prefill": 1, "decode": 128}
    assert found.plans["prefill"].whole[0] == "model.layers.*"
    assert found.devices["model.layers.1"] == last
    with dt.run(found.plans["prefill"], steps["prefill"]) as placed:
        output = placed.step(input_ids=prompt, use_cache=True)
    assert torch.equal(output.logits, read.logits)
    with dt.run(found.plans["decode"], steps["decode"]) as placed:
        output = placed.step(
            input_ids=token, past_key_values=output.past_key_values, use_cache=True
        )
    assert torch.equal(output.logits, made.logits)
    for layer, plain in zip(
        output.past_key_values.layers, made.past_key_values.layers, strict=True
    ):
        assert torch.equal(layer.keys, plain.keys)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"decode": 1}, "'decode' is not one of reading, writing"),
        ({"writing": 0}, "writing runs 0 times"),
        ({"writing": float("nan")}, "writing runs nan times"),
    ],
)
def test_weights_of_no_phase_are_refused(steps, weights, message):
    with pytest.raises(UsageError, match=message):
        dt.plan_phases(steps, CARDS, weights=weights)


def test_phases_of_different_modules_are_refused(steps):
    with pytest.raises(UsageError, match="writing and reading are of different modules"):
        dt.plan_phases({**steps, "writing": captured()["writing"]}, CARDS)


def test_phases_that_train_or_are_not_captured_are_refused(steps):
    module = nn.Linear(3, 3)
    training = dt.capture(module, torch.ones(2, 3), loss=lambda y: y.sum(), train=dt.SGD(0.1))
    with pytest.raises(UsageError, match="reading trains"):
        dt.plan_phases({"reading": training}, CARDS)
    with pytest.raises(UsageError, match="reading is a Graph; capture it"):
        dt.plan_phases({"reading": steps["reading"].graph}, CARDS)
    with pytest.raises(UsageError, match="there is none"):
        dt.plan_phases({}, CARDS)


def test_a_text_of_transformers_names_prefill_and_decode(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1}
    path.write_text(json.dumps({**small, **heads, "max_position_embeddings": 9}))
    phases = resolve_phases(f"transformers:{path}?batch=3")
    prefill, decode = phases["prefill"], phases["decode"]
    assert prefill.module is decode.module
    assert [tuple(value.shape) for value in prefill.inputs] == [(3, 8)]  # one place is for a token
    assert [tuple(value.shape) for value in decode.inputs] == [(3, 1), *[(3, 1, 8, 8)] * 4]
    assert {value.device.type for value in decode.inputs} == {"meta"}
    again = resolve(decode.source.model)
    assert again.graph.fingerprint == decode.graph.fingerprint
    assert [value.shape for value in decode.examples()[0]] == [v.shape for v in decode.inputs]
    with pytest.raises(ModelError, match="decode is a phase of inference"):
        resolve(decode.source.model, train=dt.SGD(0.1))
    with pytest.raises(ModelError, match="phases of causal language models"):
        resolve_phases("transformers:bert")


def test_a_function_that_returns_phases_says_how_to_name_one(monkeypatch):
    monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])
    text = "test_phases:two_phases"
    assert resolve(f"{text}?phase=writing").source.model == f"{text}?phase=writing"
    with pytest.raises(ModelError, match=r"returns phases; name one, .*two_phases\?phase=reading"):
        resolve(text)
    with pytest.raises(ModelError, match="has no phases"):
        resolve_phases("zoo:mlp")
    with pytest.raises(ModelError, match="has no phases"):
        resolve("test_phases:one_step?phase=decode")
    with pytest.raises(ModelError, match="has no phases"):
        resolve_phases("test_phases:one_step")


def one_step():
    return nn.Linear(2, 2), torch.ones(1, 2)


def test_the_command_writes_a_plan_for_each_phase_that_opens_again(dovetail, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])
    text, out = "test_phases:two_phases", tmp_path / "plan.json"
    command = ["plan", text, "--machine", CARDS, "--budget", FEW, "--out", out]
    status, printed, said = dovetail(*command, "--phases", "reading,writing=50", "--json")
    assert status == 0, said
    record = json.loads(printed)
    assert record["phases"]["reading"]["times"] == 1
    assert sum(phase["share"] for phase in record["phases"].values()) == pytest.approx(1)
    for name in ("reading", "writing"):
        path = tmp_path / f"plan.{name}.json"
        assert record["phases"][name]["plan"] == str(path)
        plan, _ = dt.open_plan(path, f"{text}?phase={name}")
        assert plan.value == record["phases"][name]["value"]


def test_the_command_prints_phases_and_their_placement(dovetail, monkeypatch):
    monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])
    command = ["plan", "test_phases:two_phases", "--machine", CARDS, "--budget", FEW]
    status, printed, said = dovetail(*command, "--phases", "reading=1,writing=50")
    assert status == 0, said
    for line in ("Phases", "reading", "all, weighted", "One placement", "writing by itself"):
        assert line in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--phases", "reading=x"], "'reading=x' is not PHASE=TIMES"),
        (["--phases", "reading=1,reading=2"], "is not PHASE=TIMES"),
        (["--phases", "decode=2"], "'decode' is not one of reading, writing"),
        (["--phases", "reading", "--train", "adam"], "does not go with --train"),
        (["--phases", "reading", "--for", "device-map"], "does not go with --for"),
    ],
)
def test_the_command_refuses_in_one_line(dovetail, monkeypatch, options, message):
    monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])
    status, _, said = dovetail("plan", "test_phases:two_phases", "--machine", CARDS, *options)
    assert status == 2
    assert message in " ".join(said.split())


def test_an_interrupt_while_blocks_move_keeps_the_best_so_far(steps, monkeypatch):
    real, calls = phases_module._Joint.evaluate, []

    def evaluate(joint, maps):
        calls.append(len(maps))
        if len(calls) == 2:  # the first is of the starts, this one of moves
            signal.raise_signal(signal.SIGINT)
        return real(joint, maps)

    monkeypatch.setattr(phases_module._Joint, "evaluate", evaluate)
    found = dt.plan_phases(steps, CARDS, budget="400e")
    assert len(calls) >= 2
    assert found.interrupted
    assert found.value > 0
