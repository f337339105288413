import numpy as np
import torch
from torch import nn

import dovetail as dt
from dovetail.frontends import initial_values, run_step
from dovetail.graph.copies import origins_in, shareable
from dovetail.transforms import Copies, SharedCopies, duplicate
from tests.support.transformer_models import Decoder, tokens


def copies_for_two_layers(graph):
    """Everything that may be shared, once for layer 2 and once for layer 3."""
    ops = [
        op for op in np.flatnonzero(shareable(graph)) if not graph.modules[op].startswith("layers")
    ]
    found = []
    for layer in ("layers.2", "layers.3"):
        readers = [
            op
            for op in range(len(graph))
            if graph.modules[op].startswith(layer)
            and np.isin(graph.producers[graph.inputs_of(op)], ops).any()
        ]
        found.append(Copies(tuple(map(int, ops)), tuple(readers)))
    return found


def test_copies_stand_behind_their_origins_and_only_their_readers_read_them():
    graph = dt.capture(Decoder(), tokens()).graph
    copies = copies_for_two_layers(graph)
    made = duplicate(graph, copies)
    cos = [op for op, name in enumerate(made.graph.names) if name.startswith("rotary/cos")]
    assert [made.graph.names[op] for op in cos] == [
        "rotary/cos", "rotary/cos/copy.1", "rotary/cos/copy.2"
    ]  # fmt: skip
    readers = [
        {
            made.graph.modules[r]
            for t in made.graph.outputs_of(op)
            for r in made.graph.consumers_of(t)
        }
        for op in cos
    ]
    assert readers == [{"layers.0", "layers.1"}, {"layers.2"}, {"layers.3"}]
    assert origins_in(made.graph)[cos].tolist() == [cos[0]] * 3
    assert made.graph.names != graph.names


def test_without_copies_the_graph_is_the_same():
    graph = dt.capture(Decoder(), tokens()).graph
    assert duplicate(graph, []).graph.fingerprint == graph.fingerprint


def test_a_step_with_copies_gives_the_same_bits():
    torch.manual_seed(0)
    captured = dt.capture(
        Decoder(), tokens(), loss=lambda output: output.square().mean(), train=dt.SGD(lr=0.1)
    )
    copied = SharedCopies(tuple(copies_for_two_layers(captured.graph))).apply(captured)
    plain, with_copies = initial_values(captured), initial_values(copied)
    for step in range(3):
        expected = run_step(captured, plain, captured.inputs, step=step)
        assert torch.equal(run_step(copied, with_copies, captured.inputs, step=step), expected)
    assert all(torch.equal(plain[name], with_copies[name]) for name in plain)


def test_what_is_drawn_at_random_stays_the_same_with_copies():
    captured = dt.capture(nn.Sequential(Decoder(), nn.Dropout()).train(), tokens())
    ops = np.flatnonzero(shareable(captured.graph))
    ops = [op for op in ops if ".layers." not in captured.graph.modules[op]]
    readers = [
        op
        for op in range(len(captured.graph))
        if captured.graph.modules[op].startswith("0.layers.3")
        and np.isin(captured.graph.producers[captured.graph.inputs_of(op)], ops).any()
    ]
    copied = SharedCopies((Copies(tuple(map(int, ops)), tuple(readers)),)).apply(captured)
    assert len(copied.graph) > len(captured.graph)
    expected = run_step(captured, initial_values(captured), captured.inputs, seed=3)
    assert torch.equal(run_step(copied, initial_values(copied), captured.inputs, seed=3), expected)
