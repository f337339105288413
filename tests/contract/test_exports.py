"""What a plan is exported to loads in the tool that it is for."""

import json

import pytest
import torch
from torch import nn

import dovetail as dt

GPUS = "4 x a100"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.out(self.inner(self.norm(x)).relu())


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 32), nn.Linear(32, 40)
        self.layers = nn.ModuleList(Layer() for _ in range(8))

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    model, inputs = Decoder(), torch.randint(0, 40, (4, 8))
    return model, inputs, dt.capture(model, inputs)


def plan_for(kind, step, **options):
    """A plan on all four GPUs: what pipelines ask for is that none of them is the slowest."""
    return dt.plan(
        step, GPUS, objective="load", contiguous=True, format=kind, min_gain=0.0, budget="300e",
        whole=("layers.*",), **options,
    )  # fmt: skip


def test_a_device_map_is_one_that_accelerate_takes(decoder, tmp_path):
    from accelerate.utils.modeling import check_device_map

    model, _, step = decoder
    plan = plan_for("device-map", step)
    dt.export(plan, step, "device-map", tmp_path / "map.json")
    written = json.loads((tmp_path / "map.json").read_text())
    check_device_map(model, written["device_map"])
    assert len(set(written["device_map"].values())) > 1


def test_accelerate_runs_a_model_by_a_map(decoder):
    from accelerate import dispatch_model

    model, inputs, step = decoder
    expected = model(inputs)
    made = dt.device_map(dt.plan(step, "haswell", budget="10e"), step.graph)
    assert torch.equal(dispatch_model(model, made, main_device="cpu")(inputs), expected)


def test_torch_makes_the_stages_of_split_points(decoder):
    from torch.distributed.pipelining import pipeline

    model, inputs, step = decoder
    points = dt.split_points(plan_for("split-points", step), step.graph)
    assert points
    pipe = pipeline(model, (inputs,), split_spec=points)
    assert pipe.num_stages == len(points) + 1
    found = pipe(inputs)
    torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, model(inputs))


def test_every_layer_is_in_one_part_for_torchtitan_and_counted_for_the_others(decoder, tmp_path):
    _, _, step = decoder
    plan = plan_for("torchtitan", step)
    written = {}
    for kind in ("torchtitan", "megatron", "vllm"):
        dt.export(plan, step, kind, tmp_path / kind)
        written[kind] = json.loads((tmp_path / kind).read_text())
    parts = written["torchtitan"]["module_fqns_per_model_part"]
    names = [name for part in parts for name in part]
    assert sorted(names) == sorted({"embedding", "head", *(f"layers.{i}" for i in range(8))})
    layers = [int(text) for text in written["vllm"]["VLLM_PP_LAYER_PARTITION"].split(",")]
    assert sum(layers) == 8
    assert len(layers) == len(parts)
    layout = written["megatron"]["pipeline-model-parallel-layout"]
    assert layout.startswith("E")
    assert layout.endswith("L")


def test_a_pipeline_is_a_schedule_that_torch_reads(decoder, tmp_path):
    from torch.distributed.pipelining.schedules import _Action

    model, inputs, _ = decoder
    step = dt.capture(
        model, inputs, targets=torch.randint(0, 40, (32,)), train=dt.SGD(0.1),
        loss=lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target),
    )  # fmt: skip
    plan = dt.plan(
        step, GPUS, micro_batches=8, schedule="1f1b", format="split-points", budget="100e"
    )
    dt.export(plan, step, "torch-schedule", tmp_path / "schedule.csv")
    rows = (tmp_path / "schedule.csv").read_text().splitlines()
    assert 2 <= len(rows) <= 4
    actions = [_Action.from_str(text) for row in rows for text in row.split(",")]
    assert len([action for action in actions if action is not None]) == len(rows) * 8 * 2


def test_other_formats_are_read_again(decoder, tmp_path):
    _, _, step = decoder
    plan = dt.plan(step, GPUS, budget="100e")
    dt.export(plan, step, "trace", tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    dt.export(plan, step, "model-explorer", tmp_path / "explorer")
    assert json.loads((tmp_path / "explorer" / "graph.json").read_text())
    dt.export(plan, step, "instance", tmp_path / "instance.json")
    instance = dt.load_instance(tmp_path / "instance.json")
    again = dt.plan(instance, placer="single", budget="1e")
    assert again.value > 0


def test_a_model_follows_a_plan_and_is_itself_again(decoder):
    model, inputs, step = decoder
    expected = model(inputs)
    plan = dt.plan(step, "haswell", budget="10e")
    dispatched = dt.dispatch(model, plan)
    assert torch.equal(dispatched(inputs), expected)
    assert torch.equal(dt.undispatch(dispatched)(inputs), expected)
