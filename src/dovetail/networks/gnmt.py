"""GNMT: a deep LSTM translation model; residual, its attention read by all decoder layers.

    source ─► embedding ─► encoder_lstm.0 ⇄ ─► .1 ─► .2 + ─► ... ─► .N + ─► memory
                            both directions           residual from here        │
    target ─► embedding ─► decoder_lstm.0 ─► .1 ─► .2 + ─► ... ─► .N + ─► softmax
                            ▲     │ h        ▲      ▲              ▲           (per step)
                            │     ▼          │      │              │
                            │  attention ────┴──────┴──────────────┘
                            └────────┘   contexts, for the next step

Paper: Wu et al., "Google's Neural Machine Translation System: Bridging the Gap between Human and
Machine Translation", 2016, https://arxiv.org/abs/1609.08144, section 3: 8 + 8 layers of 1024, the
first encoder layer bidirectional, residual connections from the third layer from the bottom on,
the attention context a_i of y_{i-1}, the bottom decoder layer's output of the step before, sent to
all decoder layers, 278 M parameters by Shazeer et al., "Outrageously Large Neural Networks", ICLR
2017, table 2; batch 128 (section 3.3), 32,000 word pieces (section 4.1). Zhou et al., "GDP:
Generalized Device Placement for Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578, table 1,
place it with 2, 4 and 8 layers; 40 + 40 steps are ours.
Differences: the decoder starts from the last states of the encoder, layer by layer (of the first
layer those of its backward cell), which the paper leaves open; no dropout; float32.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dovetail.networks.lstm import (
    AdditiveAttention,
    ContextCell,
    LSTMCell,
    LSTMState,
    Memory,
    Softmax,
    steps_loss,
    translation_examples,
    zero_state,
)
from dovetail.networks.records import Examples, Network

FIRST_RESIDUAL = 2
"""The index of the first layer with a residual connection: the third from the bottom."""


class BidirectionalLayer(nn.Module):
    """A layer whose two cells read the sequence from both ends."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.forwards = LSTMCell(inputs, hidden)
        self.backwards = LSTMCell(inputs, hidden)

    def forward(self, words: Tensor) -> tuple[list[Tensor], LSTMState]:
        """(per step [batch, 2 hidden], last state of the backward cell) of words
        [steps, batch, inputs]."""
        xs = words.unbind(0)
        state = zero = zero_state(words, self.hidden)
        ahead = []
        for x in xs:
            state = self.forwards(x, *state)
            ahead.append(state[0])
        state = zero
        back = []
        for x in reversed(xs):
            state = self.backwards(x, *state)
            back.append(state[0])
        pairs = zip(ahead, reversed(back), strict=True)
        return [torch.cat(pair, dim=1) for pair in pairs], state


class ResidualCell(nn.Module):
    """A cell whose output is added to its input; `context` 0: it reads none."""

    def __init__(self, hidden: int, context: int = 0) -> None:
        super().__init__()
        self.cell = ContextCell(hidden, context, hidden) if context else LSTMCell(hidden, hidden)

    def forward(self, x: Tensor, *read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(output, h', c') of x [batch, hidden], then context (if it reads one), h and c."""
        h, c = self.cell(x, *read)
        return x + h, h, c


class GNMT(nn.Module):
    """The unrolled model; at least two layers."""

    def __init__(self, layers: int = 8, hidden: int = 1024, vocabulary: int = 32_000) -> None:
        super().__init__()
        if layers < FIRST_RESIDUAL:
            raise ValueError(f"layers is {layers}, but GNMT has at least {FIRST_RESIDUAL}")
        self.hidden = hidden
        self.source_embedding = nn.Embedding(vocabulary, hidden)
        self.target_embedding = nn.Embedding(vocabulary, hidden)
        residual = range(FIRST_RESIDUAL, layers)
        self.encoder_lstm = nn.ModuleList(
            [
                BidirectionalLayer(hidden, hidden),
                LSTMCell(2 * hidden, hidden),
                *(ResidualCell(hidden) for _ in residual),
            ]
        )
        self.memory = Memory(hidden)
        self.attention = AdditiveAttention(hidden)
        self.decoder_lstm = nn.ModuleList(
            [
                *(ContextCell(hidden, hidden, hidden) for _ in range(FIRST_RESIDUAL)),
                *(ResidualCell(hidden, hidden) for _ in residual),
            ]
        )
        self.softmax = Softmax(hidden, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        """Per target step the log-probabilities [batch, vocabulary] of the next word; source and
        target [steps, batch], their steps may differ."""
        words = self.source_embedding(source)
        given = self.target_embedding(target)
        tops, states = self._encode(words)
        memory = self.memory(*tops)
        outputs = []
        for x in given.unbind(0):
            context = self.attention(states[0][0], *memory)
            for layer, cell in enumerate(self.decoder_lstm):
                state = cell(x, context, *states[layer])
                states[layer] = state[-2:]
                x = state[0]
            outputs.append(self.softmax(x))
        return tuple(outputs)

    def _encode(self, words: Tensor) -> tuple[list[Tensor], list[LSTMState]]:
        """(the top layer's output per step, the last state per layer)."""
        bottom, *above = self.encoder_lstm
        xs, last = bottom(words)
        states = [last] + [zero_state(words, self.hidden)] * len(above)
        tops = []
        for x in xs:
            for layer, cell in enumerate(above, 1):
                state = cell(x, *states[layer])
                states[layer] = state[-2:]
                x = state[0]
            tops.append(x)
        return tops, states


def _module(*, layers: int, hidden: int, vocabulary: int, **_: Any) -> nn.Module:
    return GNMT(layers, hidden, vocabulary)


def _examples(*, steps: int, batch: int, vocabulary: int, **_: Any) -> Examples:
    return translation_examples(steps, batch, vocabulary)


NETWORK = Network(
    name="gnmt",
    paper="Wu et al., 2016, https://arxiv.org/abs/1609.08144",
    description="deep residual LSTM translation model whose decoder layers all read the attention",
    defaults={"layers": 8, "hidden": 1024, "steps": 40, "batch": 128, "vocabulary": 32_000},
    small={"layers": 3, "hidden": 16, "steps": 3, "batch": 2, "vocabulary": 50},
    modules=_module,
    examples=_examples,
    loss=steps_loss,
)
