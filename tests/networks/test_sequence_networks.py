"""The sequence networks against their papers' equations, written out, and published sizes."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from dovetail.frontends import (
    SGD,
    Adam,
    capture,
    initial_values,
    matrix_flops,
    resolve,
    run_step,
)
from dovetail.networks import NETWORKS
from dovetail.networks.llama import rotate
from dovetail.networks.moe import MixtureOfExperts
from dovetail.networks.transformer_xl import shift_relative

SEQUENCES = (
    "gnmt", "gpt2", "llama", "moe", "nmt", "rnnlm", "transformer_xl", "two_tower",
)  # fmt: skip


def parameters(name, **options):
    network = NETWORKS[name]
    with FakeTensorMode():
        module = network.modules(**network.defaults | options)
    return sum(p.numel() for p in module.parameters())


def built(name, **options):
    torch.manual_seed(0)
    network = NETWORKS[name]
    return network.build(**network.small | options)


def zoo(name, **options):
    network = NETWORKS[name]
    given = network.small | options
    return f"zoo:{name}?" + "&".join(f"{k}={v}" for k, v in given.items())


# --------------------------------------------------------------------------------- sizes


def lstm_cell(inputs, hidden):
    return (inputs + hidden) * 4 * hidden + 4 * hidden


def test_gpt2_small_has_the_published_parameters():
    assert parameters("gpt2") == 124_439_808


@pytest.mark.parametrize(
    ("sizes", "published"),
    [
        ({"layers": 24, "hidden": 1024, "heads": 16}, 354_823_168),
        ({"layers": 36, "hidden": 1280, "heads": 20}, 774_030_080),
        ({"layers": 48, "hidden": 1600, "heads": 25}, 1_557_611_200),
    ],
)
def test_larger_gpt2s_have_the_published_parameters(sizes, published):
    assert parameters("gpt2", **sizes) == published


def test_llama_has_the_parameters_of_llama_3_2_1b():
    assert parameters("llama") == 1_235_814_400


@pytest.mark.parametrize(
    ("sizes", "published"),
    [
        (
            {"layers": 32, "hidden": 4096, "heads": 32, "key_heads": 32, "inner": 11_008,
             "vocabulary": 32_000, "tied": False},
            6_738_415_616,
        ),
        (
            {"layers": 32, "hidden": 4096, "heads": 32, "inner": 14_336, "tied": False},
            8_030_261_248,
        ),
    ],
    ids=["llama 2 7B", "llama 3.1 8B"],
)  # fmt: skip
def test_larger_llamas_have_the_published_parameters(sizes, published):
    assert parameters("llama", **sizes) == published


def test_the_mixture_of_experts_has_the_parameters_of_mixtral_8x7b():
    assert parameters("moe") == 46_702_792_704


def test_transformer_xl_has_the_41_m_parameters_of_its_papers_table_2():
    hidden, inner, vocabulary = 512, 2048, 204
    attention = 5 * hidden * hidden  # query, key, value, position, output
    feed_forward = 2 * hidden * inner + inner + hidden
    layer = attention + feed_forward + 4 * hidden
    expected = 12 * layer + vocabulary * hidden + vocabulary + 2 * hidden
    assert parameters("transformer_xl") == expected
    assert round(expected / 1e6) == 41


def test_nmt_has_the_size_of_its_formula():
    hidden, vocabulary = 1024, 32_000
    attention = 2 * hidden * hidden + hidden  # W, U, v
    expected = (
        2 * vocabulary * hidden
        + 3 * lstm_cell(hidden, hidden)
        + lstm_cell(2 * hidden, hidden)
        + attention
        + 2 * hidden * hidden
        + vocabulary * hidden
        + vocabulary
    )
    assert parameters("nmt") == expected


@pytest.mark.parametrize("layers", [2, 4, 8])
def test_gnmt_has_the_size_of_its_formula(layers):
    hidden, vocabulary = 1024, 32_000
    encoder = (
        2 * lstm_cell(hidden, hidden)
        + lstm_cell(2 * hidden, hidden)
        + (layers - 2) * lstm_cell(hidden, hidden)
    )
    decoder = layers * lstm_cell(2 * hidden, hidden)
    attention = 2 * hidden * hidden + hidden
    expected = 3 * vocabulary * hidden + vocabulary + encoder + decoder + attention
    assert parameters("gnmt", layers=layers) == expected


def test_gnmt_is_as_large_as_the_literature_says():
    # 278 M: Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017, table 2.
    assert parameters("gnmt") == pytest.approx(278e6, rel=0.02)


@pytest.mark.parametrize("layers", [2, 4, 8])
def test_rnnlm_has_the_size_of_its_formula_at_every_depth(layers):
    hidden, vocabulary = 2048, 10_000
    expected = 2 * vocabulary * hidden + vocabulary + layers * lstm_cell(hidden, hidden)
    assert parameters("rnnlm", layers=layers) == expected


def test_two_tower_has_the_size_of_its_formula():
    def tower(*widths):
        return sum(a * b + b for a, b in itertools.pairwise(widths))

    tables = 2 * 1_000_000 * 256
    towers = tower(2 * 256 + 32, 1024, 512, 128) + tower(256, 1024, 512, 128)
    assert parameters("two_tower") == tables + towers


# ------------------------------------------------------------------- the papers' equations


def cell_of(cell):
    """`nn.LSTMCell` with the weights of ours."""
    found = nn.LSTMCell(cell.weight_x.shape[0], cell.weight_h.shape[0])
    with torch.no_grad():
        found.weight_ih.copy_(cell.weight_x.T)
        found.weight_hh.copy_(cell.weight_h.T)
        found.bias_ih.copy_(cell.bias)
        found.bias_hh.zero_()
    return found


def attend(module, s, states):
    """Bahdanau et al., section 3.1, word by word."""
    energy = torch.stack(
        [
            torch.tanh(s @ module.attention.query.weight.T + x @ module.memory.keys.weight.T)
            @ module.attention.energy
            for x in states
        ]
    )
    weights = energy.exp() / energy.exp().sum(dim=0)
    return sum(weight[:, None] * x for weight, x in zip(weights, states, strict=True))


def softmax_of(module, x):
    return torch.log_softmax(x @ module.softmax.weight + module.softmax.bias, dim=1)


def run_layer(cell, xs):
    state = (torch.zeros(xs[0].shape[0], cell.hidden_size),) * 2
    outputs = []
    for x in xs:
        state = cell(x, state)
        outputs.append(state[0])
    return outputs, state


@torch.no_grad()
def test_nmt_is_a_stacked_encoder_and_decoder_with_bahdanaus_attention():
    module, (source, target), _, _ = built("nmt")
    xs, states = list(module.source_embedding(source)), []
    for cell in module.encoder_lstm:
        xs, state = run_layer(cell_of(cell), xs)
        states.append(state)
    bottom, top = cell_of(module.decoder_lstm[0].cell), cell_of(module.decoder_lstm[1])
    for y, output in zip(module.target_embedding(target), module(source, target), strict=True):
        context = attend(module, states[1][0], xs)
        states[0] = bottom(torch.cat([y, context], 1), states[0])
        states[1] = top(states[0][0], states[1])
        both = torch.cat([states[1][0], context], 1)
        read = torch.tanh(both @ module.readout.linear.weight.T)
        assert torch.allclose(output, softmax_of(module, read), atol=1e-5)


@torch.no_grad()
def test_gnmt_is_as_section_3_of_its_paper_says():
    module, (source, target), _, _ = built("gnmt", layers=4)
    bottom, second, *residual = module.encoder_lstm
    words, states = list(module.source_embedding(source)), []
    ahead, _ = run_layer(cell_of(bottom.forwards), words)
    back, state = run_layer(cell_of(bottom.backwards), words[::-1])
    xs = [torch.cat(pair, 1) for pair in zip(ahead, back[::-1], strict=True)]
    states.append(state)
    xs, state = run_layer(cell_of(second), xs)
    states.append(state)
    for layer in residual:
        made, state = run_layer(cell_of(layer.cell), xs)
        xs = [x + m for x, m in zip(xs, made, strict=True)]
        states.append(state)
    decoder = [cell_of(layer.cell) for layer in module.decoder_lstm[:2]]
    decoder += [cell_of(layer.cell.cell) for layer in module.decoder_lstm[2:]]
    for y, output in zip(module.target_embedding(target), module(source, target), strict=True):
        context = attend(module, states[0][0], xs)
        for i, cell in enumerate(decoder):
            states[i] = cell(torch.cat([y, context], 1), states[i])
            y = states[i][0] + (y if i >= 2 else 0)
        assert torch.allclose(output, softmax_of(module, y), atol=1e-5)


def test_gnmt_of_one_layer_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        built("gnmt", layers=1)


@pytest.mark.parametrize(("queries", "n"), [(1, 1), (3, 3), (4, 7), (5, 6)])
def test_the_relative_shift_puts_every_distance_where_its_key_is(queries, n):
    scores = torch.randn(2, 3, queries, n)
    shifted = shift_relative(scores)
    for i in range(queries):
        for j in range(n - queries + i + 1):  # the keys up to the query
            distance = n - queries + i - j
            assert torch.equal(shifted[..., i, j], scores[..., i, n - 1 - distance])


def sinusoid(distance, hidden):
    angles = distance / 10_000 ** (torch.arange(0, hidden, 2) / hidden)
    return torch.cat([angles.sin(), angles.cos()])


def attended_one_by_one(layer, u, v, x, keys_from, past):
    """Section 3.3's A_ij, pair by pair: x [length, hidden]; each position sees `past` and x from
    `keys_from` to its own."""
    attention, hidden = layer.attention, x.shape[1]
    seen = torch.cat([past, x])
    heads, size = attention.heads, hidden // attention.heads
    query = (x @ attention.query.weight.T).view(-1, heads, size)
    both = seen @ attention.key_value.weight.T
    key, value = (part.reshape(-1, heads, size) for part in both.chunk(2, dim=1))
    rows = []
    for i in range(len(x)):
        own = len(past) + i
        window = range(keys_from(i), own + 1)
        scores = []
        for j in window:
            r = (sinusoid(own - j, hidden) @ attention.position.weight.T).view(heads, size)
            q, k = query[i], key[j]
            terms = q * k + q * r + u[:, 0] * k + v[:, 0] * r
            scores.append(terms.sum(1) / size**0.5)
        weights = torch.softmax(torch.stack(scores), dim=0)  # [window, heads]
        rows.append((weights[:, :, None] * value[list(window)]).sum(0).flatten())
    x = layer.attention_norm(x + torch.stack(rows) @ attention.output.weight.T)
    return layer.feed_forward_norm(x + layer.feed_forward(x))


@torch.no_grad()
@pytest.mark.parametrize("memory", [6, 4])
def test_two_segments_with_memory_are_one_sequence_seen_through_a_window(memory):
    # A position of the second segment sees the same states as in one long sequence, from
    # `memory` positions ahead of its segment on.
    segment = 6
    module, _, _, _ = built("transformer_xl", memory=memory)
    module.positions.u.normal_()
    module.positions.v.normal_()
    tokens = torch.randint(20, (1, 2 * segment))
    kept = tuple(torch.randn(1, memory, 16) for _ in module.layers)
    states = module.embedding(tokens)[0] * 4
    for layer, past in zip(module.layers, kept, strict=True):
        # Position i begins to see at the start of its segment's memory.
        states = attended_one_by_one(
            layer, module.positions.u, module.positions.v, states,
            lambda i: 0 if i < segment else segment, past[0],
        )  # fmt: skip
    expected = module.softmax(states)
    first, following = module(tokens[:, :segment], *kept)
    second, _ = module(tokens[:, segment:], *following)
    assert torch.allclose(first[0], expected[:segment], atol=1e-5)
    assert torch.allclose(second[0], expected[segment:], atol=1e-5)


def test_no_gradient_goes_through_a_memory():
    module, (tokens, *memories), _, _ = built("transformer_xl")
    output, following = module(tokens, *memories)
    assert output.requires_grad
    assert [m.shape for m in following] == [m.shape for m in memories]
    assert not any(m.requires_grad for m in following)


@torch.no_grad()
def test_gpt2_is_torchs_transformer_normalised_first():
    module, (tokens,), _, _ = built("gpt2")
    plain = nn.TransformerEncoderLayer(
        16, 2, 64, dropout=0.0, activation=nn.GELU("tanh"), batch_first=True, norm_first=True
    ).eval()
    x = module.embedding(tokens) + module.positions.weight
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    for layer in module.layers:
        for ours, theirs in (
            (layer.attention.query_key_value.weight, plain.self_attn.in_proj_weight),
            (layer.attention.query_key_value.bias, plain.self_attn.in_proj_bias),
            (layer.attention.output.weight, plain.self_attn.out_proj.weight),
            (layer.attention.output.bias, plain.self_attn.out_proj.bias),
            (layer.mlp[0].weight, plain.linear1.weight),
            (layer.mlp[0].bias, plain.linear1.bias),
            (layer.mlp[2].weight, plain.linear2.weight),
            (layer.mlp[2].bias, plain.linear2.bias),
        ):
            theirs.copy_(ours)
        x = plain(x, src_mask=mask)
    expected = F.layer_norm(x, (16,)) @ module.embedding.weight.T
    assert torch.allclose(module(tokens), expected, atol=1e-5)


@torch.no_grad()
def test_llama_is_its_papers_equations():
    module, (tokens,), _, _ = built("llama", layers=1)

    def norm(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    def turned(x):
        # Su et al., section 3.2: the pair as a complex number, times e^(i position theta).
        pairs = torch.complex(x[..., :2].contiguous(), x[..., 2:].contiguous())
        frequencies = 500_000.0 ** (-torch.arange(0, 4, 2) / 4)
        angles = torch.arange(8)[:, None, None] * frequencies
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], -1)

    layer, x = module.layers[0], module.embedding(tokens)
    read = norm(x)
    q = turned(layer.attention.query(read).view(2, 8, 4, 4))
    k = turned(layer.attention.key(read).view(2, 8, 2, 4))
    v = layer.attention.value(read).view(2, 8, 2, 4)
    heads = []
    for head in range(4):
        scores = q[:, :, head] @ k[:, :, head // 2].transpose(1, 2) / 2
        scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ v[:, :, head // 2])
    x = x + layer.attention.output(torch.cat(heads, -1))
    feed, read = layer.feed_forward, norm(x)
    gate = feed.gate(read)
    x = x + feed.down(gate * torch.sigmoid(gate) * feed.up(read))
    expected = norm(x) @ module.embedding.weight.T
    assert torch.allclose(module(tokens), expected, atol=1e-5)


def test_rotated_products_depend_on_distance_alone():
    q, k = torch.randn(4), torch.randn(4)
    angles = torch.arange(6)[:, None] * torch.tensor([1.0, 0.1])
    products = rotate(q, angles.cos(), angles.sin()) @ rotate(k, angles.cos(), angles.sin()).T
    assert torch.allclose(products[:-1, :-1], products[1:, 1:], atol=1e-5)
    assert not torch.allclose(products[0], products[1])


@pytest.mark.parametrize("name", ["gpt2", "llama", "transformer_xl"])
@torch.no_grad()
def test_a_decoder_sees_no_later_token(name):
    module, (tokens, *rest), _, _ = built(name)
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 20
    before, after = module(tokens, *rest), module(changed, *rest)
    if name == "transformer_xl":
        before, after = before[0], after[0]
    assert torch.allclose(before[:, :4], after[:, :4], atol=1e-6)
    assert not torch.allclose(before[:, 4], after[:, 4])


@torch.no_grad()
def test_the_mixture_of_experts_sees_no_later_token_while_its_experts_have_room():
    module, (tokens,), _, _ = built("moe", capacity=2.0)
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 20
    before, after = module(tokens)[0], module(changed)[0]
    assert torch.allclose(before[:, :4], after[:, :4], atol=1e-6)
    assert not torch.allclose(before[:, 4], after[:, 4])


def one_by_one(mixture, x, capacity):
    """Mixtral's section 2.1 token by token; per expert at most `capacity`, heaviest first."""
    tokens = x.flatten(0, 1)
    scores = tokens @ mixture.gate.scores.weight.T
    weight = {}
    for t, row in enumerate(scores.tolist()):
        chosen = sorted(range(len(row)), key=lambda e: -row[e])[: mixture.gate.active]
        shares = torch.softmax(torch.tensor([row[e] for e in chosen]), 0).tolist()
        weight |= {(t, e): share for e, share in zip(chosen, shares, strict=True)}
    out = torch.zeros_like(tokens)
    dropped = 0
    for e, expert in enumerate(mixture.experts):
        mine = sorted((t for t, other in weight if other == e), key=lambda t: -weight[t, e])
        dropped += len(mine[capacity:])
        for t in mine[:capacity]:
            out[t] += weight[t, e] * expert.feed_forward(tokens[t])
    return out.view_as(x), dropped


@torch.no_grad()
@pytest.mark.parametrize(("capacity", "most", "drops"), [(2.0, 12, False), (0.5, 3, True)])
def test_a_mixture_of_experts_equals_a_loop_over_its_tokens(capacity, most, drops):
    torch.manual_seed(0)
    mixture = MixtureOfExperts(8, 16, experts=4, active=2, capacity=capacity)
    x = torch.randn(2, 6, 8)
    expected, dropped = one_by_one(mixture, x, most)
    assert (dropped > 0) == drops
    assert torch.allclose(mixture(x)[0], expected, atol=1e-6)


@torch.no_grad()
def test_the_balancing_loss_is_1_when_all_experts_are_used_alike():
    mixture = MixtureOfExperts(4, 8, experts=4, active=1, capacity=1.0)
    mixture.gate.scores.weight.copy_(torch.eye(4))
    even, uneven = torch.eye(4)[None], torch.eye(4)[[0, 0, 0, 0]][None]
    assert mixture(even)[1].item() == pytest.approx(1)
    assert mixture(uneven)[1].item() == pytest.approx(4 * torch.eye(4)[0].softmax(0)[0].item())


@torch.no_grad()
def test_two_tower_scores_are_cosines_and_its_loss_is_sampling_corrected():
    module, inputs, loss, (log_probabilities,) = built("two_tower")
    watches, searches, features, item = inputs
    scores = module(*inputs) * 0.05
    means = [module.items(watches).mean(1), module.words(searches).mean(1), features]
    user = module.user.mlp(torch.cat(means, 1))
    other = module.item.mlp(module.items(item))
    for b in range(len(item)):
        cosines = F.cosine_similarity(user[b : b + 1], other)
        assert torch.allclose(scores[b], cosines, atol=1e-6)
    corrected = (scores / 0.05 - log_probabilities).log_softmax(1)
    expected = -corrected.diagonal().mean()
    assert loss(scores / 0.05, log_probabilities).item() == pytest.approx(expected.item(), rel=1e-5)


# ----------------------------------------------------------------------- running, capturing


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_small_one_runs_and_trains(name):
    module, inputs, loss, targets = built(name)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        value = loss(module(*inputs), *targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        outputs = module.eval()(*inputs)
    assert loss(outputs, *targets).isfinite()


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_small_one_is_captured_for_inference_and_training(name):
    inference, training = resolve(zoo(name)).graph, resolve(zoo(name), train=Adam()).graph
    assert 0 < matrix_flops(inference) < matrix_flops(training) <= 3.5 * matrix_flops(inference)
    named = dict(NETWORKS[name].build(**NETWORKS[name].small)[0].named_parameters())
    assert training.kinds.count("dovetail.adam") == len(named)


@pytest.mark.parametrize("name", SEQUENCES)
def test_captured_steps_of_a_small_one_are_its_plain_steps(name):
    module, inputs, loss, targets = built(name)
    captured = capture(module.train(), *inputs, targets=targets, loss=loss, train=SGD(0.1))
    values = initial_values(captured)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        expected = loss(module(*inputs), *targets)
        expected.backward()
        optimizer.step()
        found = run_step(captured, values, inputs, targets)
        assert float(found) == pytest.approx(expected.item(), rel=1e-5)


def test_flops_of_the_captured_decoders_are_those_of_their_formulas():
    batch, length, hidden, vocabulary = 2, 8, 16, 50
    tokens, pairs = batch * length, batch * length * length
    gpt2 = 2 * (2 * tokens * 12 * hidden**2 + 4 * pairs * hidden)
    assert matrix_flops(resolve(zoo("gpt2")).graph) == gpt2 + 2 * tokens * hidden * vocabulary
    attention = 2 * tokens * hidden * (2 * hidden + 2 * 8) + 4 * pairs * hidden
    llama = 2 * (attention + 3 * 2 * tokens * hidden * 32)
    assert matrix_flops(resolve(zoo("llama")).graph) == llama + 2 * tokens * hidden * vocabulary
    taken = 10  # ceil(1.25 x 2 / 4 x 16)
    moe = 2 * (attention + 2 * tokens * hidden * 4 + 4 * 3 * 2 * taken * hidden * 32)
    assert matrix_flops(resolve(zoo("moe")).graph) == moe + 2 * tokens * hidden * vocabulary


def test_flops_of_captured_nmt_are_those_of_its_formula():
    batch, steps, hidden, vocabulary = 3, 4, 16, 50
    product = 2 * batch * hidden * hidden
    cells = steps * (4 * 8 + 4) * product  # four layers; the decoder's bottom reads a context
    attention = steps * (2 * product + 2 * 2 * batch * steps * hidden)
    readout = steps * (2 * product + 2 * batch * hidden * vocabulary)
    assert matrix_flops(resolve(zoo("nmt")).graph) == cells + attention + readout


def test_networks_import_none_of_the_other_parts():
    code = (
        "import sys, dovetail.networks\n"
        "names = {n for n in sys.modules if n.split('.')[0] == 'dovetail'}\n"
        "print(sorted(n for n in names if n.split('.')[1:2] not in ([], ['networks'])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
