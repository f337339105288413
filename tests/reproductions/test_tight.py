"""Rows with little memory: neither one GPU nor the expert fits, and training meets that."""

import pytest

from dovetail.pipeline import graph_of, resolve_model
from reproductions.cases import RL17_CASES, TIGHT_BYTES, machine_of, with_gpu_memory
from reproductions.learned import run_learned, task_of
from reproductions.methods import PLAIN, TIGHT_SHARE, lay_ground, run_method, tight_bytes
from reproductions.orderings import is_oom, orderings_of
from reproductions.tables import lines_of
from tests.support.bench_samples import make_row
from tests.support.tiny_tables import CASES, RNN

TIGHT = {case.key: case for case in RL17_CASES if case.gpu_memory_bytes is not None}
WIDE = machine_of(CASES[1])


@pytest.fixture(scope="module")
def graph():
    return graph_of(resolve_model(RNN, "adam"))


@pytest.fixture(scope="module")
def tight(graph):
    return with_gpu_memory(WIDE, tight_bytes(graph, WIDE))


def needs(graph, machine, method):
    """What a method's placement needs on its fullest GPU, and what became of it."""
    found, _ = run_method(lay_ground(graph, machine, PLAIN, seed=0), method, "100e")
    return max(found.peak_memory_bytes[f"k80:{i}"] for i in range(4)), found


def test_the_memory_is_a_share_of_what_the_expert_needs_if_memory_is_short(graph, tight):
    scarce, _ = needs(graph, with_gpu_memory(WIDE, 1), "expert")
    assert scarce <= needs(graph, WIDE, "expert")[0]
    assert tight.devices[0].memory_bytes == int(TIGHT_SHARE * scarce)
    assert [device.memory_bytes for device in tight.devices if device.kind == "cpu"] == [
        device.memory_bytes for device in WIDE.devices if device.kind == "cpu"
    ]


def test_neither_one_gpu_nor_the_expert_fits_and_something_else_does(graph, tight):
    for method in ("1 GPU", "expert"):
        assert is_oom(needs(graph, tight, method)[1])
    assert needs(graph, tight, "auto")[1].seconds is not None


@pytest.mark.parametrize("method", ["seq2seq", "seq2seq-paper"])
def test_a_training_meets_placements_that_do_not_fit_and_finds_one_that_does(graph, tight, method):
    task, grouping = task_of("tight", graph, tight, method)
    run, placement = run_learned(task, grouping, method, trials=96, seed=0)
    assert 0 < run.invalid_share < 1
    problem = task.problem(threads=1)
    found = problem.evaluate(problem.spread(placement[None]))
    assert (found.peak_memory_bytes[0] <= problem.capacities).all()
    assert run.found.seconds == found.values[0]


def test_every_network_stands_once_with_little_memory_and_without_figures_of_the_paper():
    assert {case.key.replace("-tight", "") for case in TIGHT.values()} == set(TIGHT_BYTES)
    wide = {case.key: case for case in RL17_CASES if case.gpus == 4}
    assert {key for key in wide if key not in TIGHT} == set(TIGHT_BYTES)
    for key, case in TIGHT.items():
        of = wide[key.replace("-tight", "")]
        assert (case.model, case.train, case.published) == (of.model, of.train, None)
        assert case.ours.startswith("The whole row is ours")
        gpus = [device for device in machine_of(case).devices if device.kind == "gpu"]
        assert {gpu.memory_bytes for gpu in gpus} == {TIGHT_BYTES[of.key]}
        assert orderings_of(case, make_row(key), "plain", machine_of(case)) == ()
        line = next(lines_of("rl17", [case], [make_row(key)]))
        assert (line["gpu_memory_bytes"], line["paper_column"]) == (case.gpu_memory_bytes, "")


def test_the_memory_of_a_row_is_what_the_rule_says_of_its_graph():
    case = next(case for case in RL17_CASES if case.key == "rnnlm-large-4gpu")
    graph = graph_of(resolve_model(case.model, case.train))
    assert TIGHT_BYTES[case.key] == tight_bytes(graph, machine_of(case))
