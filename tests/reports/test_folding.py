import numpy as np

from dovetail.graph.records import Phase
from dovetail.reports import pictures
from dovetail.reports.pictures import fold
from tests.support.report_samples import make_graph, make_machine, make_plan, training_chain

F, S = Phase.FORWARD, Phase.SOURCE


def layers_of(count, device_of, extra=()):
    """An inference through `embed`, numbered layers of two modules each, and `head`."""
    rows = [("embed/w", S, [], "net.embed"), ("embed/mm", F, [0], "net.embed")]
    for i in range(count):
        parts = ("norm", "mlp", "gate") if i in extra else ("norm", "mlp")
        for part in parts:
            path = f"net.layers.{i}.{part}"
            rows.append((f"{path}/w", S, [], path))
            rows.append((f"{path}/mm", F, [len(rows) - 1, len(rows) - 2], path))
    rows.append(("head/mm", F, [len(rows) - 1], "net.head"))
    graph = make_graph(rows)
    placement = [device_of(module) for module in graph.modules]
    return graph, make_plan(graph, make_machine(2), placement)


def by_layer(first_on_the_second):
    def device_of(module):
        parts = module.split(".")
        late = parts[1] == "head" or (parts[1] == "layers" and int(parts[2]) >= first_on_the_second)
        return int(late)

    return device_of


def shown(folds, opened=None):
    known = set(folds.opened if opened is None else opened)
    return [
        folds.paths[f]
        for f in range(len(folds.labels))
        if all(around in known for around in list(folds.around(f))[1:])
    ]


def test_layers_alike_on_one_device_are_one_fold():
    graph, plan = layers_of(10, by_layer(6))
    folds = fold(graph, plan)
    assert shown(folds) == [
        "(model)", "net", "net.embed", "net.layers", "net.layers.0-5", "net.layers.6-9",
        "net.head",
    ]  # fmt: skip
    run = folds.paths.index("net.layers.0-5")
    assert folds.labels[run] == "0-5"
    assert run in folds.runs
    within = [folds.paths[f] for f in range(len(folds.labels)) if folds.parents[f] == run]
    assert within == [f"net.layers.{i}" for i in range(6)]


def test_a_layer_of_another_make_ends_a_run_and_so_does_a_split_one():
    graph, plan = layers_of(7, by_layer(9), extra=(3,))
    runs = [p for p in shown(fold(graph, plan)) if p.count(".") == 2]
    assert runs == ["net.layers.0-2", "net.layers.3", "net.layers.4-6"]
    graph, plan = layers_of(7, lambda module: int(module == "net.layers.3.mlp"))
    runs = [p for p in shown(fold(graph, plan)) if p.count(".") == 2]
    assert runs == ["net.layers.0-2", "net.layers.3", "net.layers.4-6"]


def test_modules_that_hold_nothing_but_the_next_are_one_fold():
    graph = make_graph([("a", F, [], "x.y.one"), ("b", F, [0], "x.y.two")])
    folds = fold(graph, make_plan(graph, make_machine(1), [0, 0]))
    assert folds.labels == ("(model)", "x.y", "one", "two")
    assert folds.parents.tolist() == [-1, 0, 1, 1]


def test_seconds_and_parameters_are_summed_per_device_up_the_tree():
    graph, plan = layers_of(10, by_layer(6))
    folds = fold(graph, plan)
    ops = ~graph.is_source
    spent = [plan.compute_seconds[ops & (plan.placement == d), d].sum() for d in (0, 1)]
    assert np.allclose(folds.seconds[0], spent)
    # 64 bytes a weight: one of the embedding, and two a layer; the head has none.
    assert folds.parameter_bytes[0].tolist() == [64 * 13, 64 * 8]
    run = folds.paths.index("net.layers.6-9")
    assert folds.parameter_bytes[run].tolist() == [0, 64 * 8]
    for index in range(len(folds.labels)):
        inner = np.flatnonzero(folds.parents == index)
        own = folds.seconds[index] - folds.seconds[inner].sum(axis=0)
        assert (own >= -1e-12).all()


def test_a_weight_that_two_devices_read_in_inference_is_held_by_both():
    graph = make_graph([("w", S, [], "a"), ("x", F, [0], "a"), ("y", F, [0, 1], "b")])
    folds = fold(graph, make_plan(graph, make_machine(2), [0, 0, 1]))
    assert folds.parameter_bytes[0].tolist() == [64, 64]


def test_every_op_is_in_one_leaf_of_its_module_phase_and_device():
    graph = training_chain(12)
    placement = np.random.default_rng(0).integers(0, 2, len(graph))
    folds = fold(graph, make_plan(graph, make_machine(2), placement))
    for op in np.flatnonzero(~graph.is_source).tolist():
        leaf = int(folds.leaf_of[op])
        assert folds.paths[folds.leaf_folds[leaf]] == graph.modules[op]
        assert folds.leaf_phases[leaf] == graph.phases[op]
        assert folds.leaf_devices[leaf] == placement[op]
    assert (folds.leaf_of[graph.is_source] == -1).all()


def test_a_leaf_is_drawn_in_the_outermost_closed_fold_around_it():
    graph, plan = layers_of(4, by_layer(9))
    folds = fold(graph, plan)
    at = folds.paths.index
    opened = [0, at("net"), at("net.layers"), at("net.layers.0-3"), at("net.layers.2")]
    drawn = {folds.paths[f] for f in folds.shown(opened).tolist()}
    assert drawn == {
        "net.embed", "net.layers.0", "net.layers.1", "net.layers.2.norm", "net.layers.2.mlp",
        "net.layers.3", "net.head",
    }  # fmt: skip
    assert {folds.paths[f] for f in folds.shown([]).tolist()} == {"(model)"}


def test_a_model_too_deep_is_cut_off_and_no_more_is_open_than_can_be_seen(monkeypatch):
    monkeypatch.setattr(pictures, "MOST_LEAVES", 5)
    graph, plan = layers_of(10, by_layer(6))
    folds = fold(graph, plan)
    assert (
        folds.paths == ("(model)", "net.embed", "net.layers", "net.head")
        or len(folds.leaf_folds) <= 5
    )
    monkeypatch.undo()
    monkeypatch.setattr(pictures, "MOST_SHOWN", 4)
    folds = fold(graph, plan)
    nodes = set(zip(folds.shown(folds.opened).tolist(), folds.leaf_devices.tolist(), strict=True))
    assert len(nodes) <= 4


def test_eighty_layers_fold_to_a_line_a_device():
    graph, plan = layers_of(80, by_layer(44))
    assert shown(fold(graph, plan)) == [
        "(model)", "net", "net.embed", "net.layers", "net.layers.0-43", "net.layers.44-79",
        "net.head",
    ]  # fmt: skip
