"""`benchmarks/stages/counts.py` counts what was published, and a small network."""

import pytest

from dovetail.schedulers.blocks import cut
from dovetail.schedulers.dos import dos
from tests.support.benchmark_scripts import benchmark_scripts

INCEPTION = "zoo:inception_v3?batch=1&size=80"


@pytest.fixture(scope="module")
def counts():
    with benchmark_scripts("stages", "counts") as scripts:
        yield scripts.counts


def test_inception_v3_has_the_states_and_transitions_of_the_published_graph(counts):
    """119 ops: no concatenations inside a block, no dropout and flattening (single ops)."""
    block = counts.Network(INCEPTION).block
    whole = [part.block for part in cut(block) if 1 < len(part.block) < 13]
    dissolved = list(counts._without_inner_joins(block))
    found = [dos(part, counts.by_size) for part in [*whole, *dissolved]]
    singles = 119 - sum(len(part) for part in [*whole, *dissolved])
    assert [len(part) for part in dissolved] == [11, 11]
    assert singles == 8
    assert sum(of_part.states for of_part in found) + singles == 1206
    assert sum(of_part.transitions for of_part in found) + singles == 9504


@pytest.mark.parametrize(("nodes", "seed"), [(16, 2), (32, 4)])
def test_random_graphs_have_one_end_and_no_edge_back(counts, nodes, seed):
    block = counts.random_graph(nodes, seed)
    assert len(block) == nodes + 1
    assert sum(ops.bit_count() for ops in block.predecessors[:-1]) == 2 * nodes
    unread = {op for op in range(nodes) if not any(b >> op & 1 for b in block.predecessors[:-1])}
    assert block.predecessors[-1] == sum(1 << op for op in unread)


def test_tables_of_small_networks(counts, monkeypatch, capsys):
    monkeypatch.setattr(counts, "NETWORKS", {"InceptionV3": INCEPTION})
    monkeypatch.setattr(counts, "SEARCHES", (("InceptionV3", "dos"),))
    monkeypatch.setattr(counts, "THEIR_RANDOM_GRAPHS", ((16, 2),))
    counts.main(["--rounds", "1"])
    text = capsys.readouterr().out
    assert "| InceptionV3 | 124 | 1,351 | 10,921 | " in text
    assert "| InceptionV3: 3 | 12 | 144 | 1,012 | 4 |" in text
    assert "| their generator: 16 nodes, seed 2 | 17 | 132 | 758 | 1 |" in text
    assert "| InceptionV3's last, inner concatenations dissolved | 11 | 180 | 1,966 | 2 |" in text
    assert "| InceptionV3 `dos` | 1,351 | 10,921 | " in text
