"""Plans with whole modules, for a format, and beside somebody else's placement."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import dovetail as dt
from dovetail.errors import ExportError, FileFormatError, SplitModuleError, UsageError
from dovetail.exports import DeviceMap
from dovetail.pipeline import opening, planned, prices, verify
from dovetail.plans import check
from tests.support.transformer_models import MODELS, Decoder, LentTable, captured_model, tokens

BOX = "2 x p100 + haswell"


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    return dt.capture(Decoder(), tokens())


@pytest.mark.parametrize("objective", ["step", "load"])
@pytest.mark.parametrize("format", ["device-map", "split-points"])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_for_a_format_exports_and_opens_again(name, format, objective, tmp_path):
    step = captured_model(name)
    plan = dt.plan(step, BOX, format=format, objective=objective, budget="200e")
    assert plan.made_for == format
    assert dt.export(plan, step, format) is not None
    plan.save(tmp_path / "plan.json")
    again = dt.load_plan(tmp_path / "plan.json")
    assert (again.made_for, again.whole, again.notes) == (format, plan.whole, plan.notes)
    check(again, step.graph)
    verify(again, step.graph)


def test_what_the_model_says_not_to_split_is_whole_for_a_format_and_the_plan_says_so(step):
    plan = dt.plan(step, BOX, format="device-map", budget="100e")
    assert plan.whole == ("layers.*",)
    assert plan.notes[0] == "kept whole: layers.*, as the model says not to split Layer"
    assert dt.plan(step, BOX, budget="10e").whole == ()


def test_two_layers_can_be_pinned_apart(step):
    pins = [("layers.0", "p100:0"), ("layers.1", "p100:1")]
    plan = dt.plan(step, BOX, pins=pins, budget="50e")
    graph = planned(plan, step).graph
    for pattern, device in pins:
        inside = [m.startswith(pattern) for m in graph.modules] & ~graph.is_source
        assert set(plan.placement[inside].tolist()) == {plan.machine.device_index(device)}


def test_a_split_module_that_should_be_whole_is_named(step):
    plan = dt.plan(step, BOX, whole=["layers.*"], placer="single", budget="1e")
    placement = plan.placement.copy()
    placement[step.graph.index["layers.1.down/addmm"]] = (placement.max() + 1) % 2
    with pytest.raises(SplitModuleError, match=r"module 'layers.1' is kept whole") as raised:
        check(replace(plan, placement=placement, orders=None), step.graph)
    assert raised.value.module == "layers.1"


def test_a_plan_that_is_not_what_its_format_can_say_does_not_open(step, tmp_path):
    dt.save_graph(step.graph, tmp_path / "graph.json")
    plan = dt.plan(dt.load_graph(tmp_path / "graph.json"), BOX, placer="expert", budget="1e")
    source = replace(plan.source, model=str(tmp_path / "graph.json"))
    plan = replace(plan, source=source, made_for="split-points", objective="step")
    placement = plan.placement.copy()
    placement[step.graph.index["layers.1.down/addmm"]] = (
        1 - placement[step.graph.index["layers.1.up/addmm"]]
    )
    replace(plan, placement=placement, orders=None).save(tmp_path / "plan.json")
    with pytest.raises(ExportError):
        dt.open_plan(tmp_path / "plan.json")


def test_instances_and_devices_without_a_name_are_refused(step):
    with pytest.raises(UsageError, match="a device-map has no name for haswell:1"):
        dt.plan(step, "p100 + 2 x haswell", format="device-map", pins=[("head", "haswell:1")])


def force_copies(monkeypatch):
    """Whatever is shared is copied, whatever that costs."""
    monkeypatch.setattr(opening, "_sending_seconds", lambda *_: float("inf"))
    judged = opening._copied
    monkeypatch.setattr(
        opening, "_copied", lambda plan, *rest: judged(replace(plan, value=float("inf")), *rest)
    )


@pytest.mark.usefixtures("forked_workers")
def test_a_plan_with_copies_runs_bit_for_bit_and_opens_again(step, tmp_path, monkeypatch):
    force_copies(monkeypatch)
    pins = [("layers.0", "cpu0"), ("layers.1", "cpu0"), ("layers.[23]", "cpu1")]
    plan = dt.plan(step, "here/2", pins=pins, budget="20e")
    assert plan.copies
    assert plan.lower_bound <= plan.value
    plan.save(tmp_path / "plan.json")
    again = dt.load_plan(tmp_path / "plan.json")
    assert again.copies == plan.copies
    verify(again, step.graph)
    graph = planned(again, step).graph
    check(again, graph)
    copies = [op for op, name in enumerate(graph.names) if "/copy." in name]
    assert {plan.machine.device_names[d] for d in plan.placement[copies]} <= {"cpu0", "cpu1"}
    with dt.run(again, step) as placed:
        assert torch.equal(placed.step(tokens()), step.module(tokens()))


def test_a_device_map_knows_nothing_of_copies(step, monkeypatch):
    pins = [(f"layers.{i}", f"p100:{i // 2}") for i in range(4)] + [("head", "p100:1")]
    pins += [("embedding", "p100:0"), ("rotary", "p100:0")]
    plain = dt.plan(step, BOX, pins=pins, whole=["layers.*"], budget="20e")
    force_copies(monkeypatch)
    copied = dt.plan(step, BOX, pins=pins[:-1], whole=["layers.*"], budget="20e")
    assert copied.copies
    for one in (plain, copied):
        assert dt.device_map(one, step.graph)["layers.3"] == 1


def test_somebody_elses_map_is_a_row_and_one_with_a_cpu_is_two(step, tmp_path):
    place = {"embedding": 0, "rotary": 0, "layers": 0, "layers.3": "cpu", "head": 1}
    (tmp_path / "map.json").write_text(json.dumps(place))
    plan = dt.plan(step, BOX, place=tmp_path / "map.json", budget="20e")
    assert {"map.json", "map.json by accelerate", "accelerate auto"} <= set(plan.baselines)
    assert plan.baselines["map.json by accelerate"] > 0
    everything = dt.plan(step, BOX, place={"": 1}, placer="single", budget="1e")
    alone = dt.plan(step, "p100", placer="single", budget="1e")
    assert everything.baselines["given map"] == pytest.approx(alone.value, rel=1e-9)
    assert "given map by accelerate" not in everything.baselines


def test_a_map_whose_main_device_is_the_cpu_is_computed_there(step, tmp_path):
    place = {"embedding": 0, "rotary": 0, "layers": 0, "layers.3": "cpu", "head": 0}
    rows = {}
    for main in ("cpu", 0, None):
        raw = {"device_map": place} if main is None else {"device_map": place, "main_device": main}
        (tmp_path / "map.json").write_text(json.dumps(raw))
        found = dt.plan(step, BOX, place=tmp_path / "map.json", placer="single", budget="1e")
        rows[main] = {k: v for k, v in found.baselines.items() if k.startswith("map.json")}
    assert list(rows["cpu"]) == ["map.json"]
    assert list(rows[0]) == ["map.json", "map.json by accelerate"]
    assert rows[0] == rows[None]
    with pytest.raises(UsageError, match="'main_device' is on 'cuda:9'"):
        dt.plan(step, BOX, place=DeviceMap(place, "cuda:9"), placer="single", budget="1e")


def test_streamed_weights_cost_at_least_their_bytes_over_the_link(step):
    whole = {"": 0}
    streamed = {"": 0, "layers": "cpu"}
    rows = dt.plan(step, BOX, place=streamed, placer="single", budget="1e").baselines
    resident = dt.plan(step, BOX, place=whole, placer="single", budget="1e").baselines
    weights = sum(p.numel() * 4 for p in step.module.layers.parameters())
    link = next(
        one for one in dt.plan(step, BOX, placer="single", budget="1e").machine.links
        if one.destination == "p100:0"
    )  # fmt: skip
    more = rows["given map by accelerate"] - resident["given map"]
    assert more >= weights / link.bandwidth_bytes_per_second


def test_a_plan_of_ours_is_priced_as_it_promises(step, tmp_path):
    theirs = dt.plan(step, BOX, placer="expert", budget="1e")
    theirs.save(tmp_path / "theirs.json")
    plan = dt.plan(step, BOX, place=tmp_path / "theirs.json", placer="single", budget="1e")
    assert plan.baselines["theirs.json"] == pytest.approx(theirs.value, rel=1e-9)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({"layers.9": 0}, "'layers.9' is no module or parameter"),
        ({"": "9" * 5000}, "'' is on '99999"),
        ({"": "disk"}, "on disk, where nothing runs"),
        ({"": 7}, "'' is on 7; 2 x p100 .* has .*accelerators 0 to 1"),
    ],
)
def test_a_map_that_cannot_be_is_refused(step, place, says):
    with pytest.raises(UsageError, match=says):
        dt.plan(step, BOX, place=place, budget="1e")


def test_a_file_that_is_neither_plan_nor_map_is_refused(step, tmp_path):
    (tmp_path / "map.json").write_text("[1, 2]")
    with pytest.raises(FileFormatError, match="neither a plan nor a device map"):
        dt.plan(step, BOX, place=tmp_path / "map.json", budget="1e")


def test_training_steps_have_plans_for_formats_too():
    torch.manual_seed(0)
    step = dt.capture(
        Decoder(), tokens(), loss=lambda output: output.square().mean(), train=dt.Adam()
    )
    for format in ("device-map", "split-points"):
        plan = dt.plan(step, BOX, format=format, objective="load", budget="300e")
        dt.export(plan, step, format)
        assert np.isfinite(plan.value)


def test_weights_that_accelerate_leaves_on_a_host_that_is_no_device_have_no_price(
    step, monkeypatch
):
    monkeypatch.setattr(prices, "accelerates_own", lambda *_: {"layers": 0, "head": "cpu"})
    plan = dt.plan(step, "2 x p100", place={"": 1}, budget="20e")
    assert plan.baselines["accelerate auto"] is None
    assert plan.baselines["given map"] is not None


def test_what_fails_in_accelerates_own_map_is_a_note_and_no_error():
    step = dt.capture(LentTable(), torch.arange(8)[None])
    plan = dt.plan(step, "4 x a100", format="device-map", budget="30e")
    note = "accelerate's map could not be priced: IndexError: list index out of range"
    assert plan.notes[-1] == note
    assert "accelerate auto" not in plan.baselines
    assert dt.device_map(plan, step.graph)
