"""GNMT: a deep residual LSTM translation model, all of whose decoder layers read the attention.

    source ─► embedding ─► encoder_lstm.0 ⇄ ─► .1 ─► .2 + ─► ... ─► .N + ─► memory
                            both directions           residual from here        │
    target ─► embedding ─► decoder_lstm.0 ─► .1 ─► .2 + ─► ... ─► .N + ─► softmax
                            ▲     │ h        ▲      ▲              ▲           (per step)
                            │     ▼          │      │              │
                            │  attention ────┴──────┴──────────────┘
                            └────────┘   contexts, for the next step

Paper: Wu et al., "Google's Neural Machine Translation System: Bridging the Gap between Human and
Machine Translation", 2016, https://arxiv.org/abs/1609.08144, section 3. The model has 8 + 8 layers
of 1024. The first encoder layer is bidirectional. Residual connections begin at the third layer
from the bottom. The attention context a_i is computed from y_{i-1}, the bottom decoder layer's
output of the step before, and all decoder layers read it. The batch of 128 is from section 3.3,
the 32,000 word pieces from section 4.1.

Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017, table 2, give 278 M parameters.
Zhou et al., "GDP: Generalized Device Placement for Dataflow Graphs", 2019,
https://arxiv.org/abs/1910.01578, table 1, place it with 2, 4 and 8 layers.
Differences: the decoder starts from the last states of the encoder, layer by layer, which the paper
leaves open (its first layer starts from the state of the encoder's backward cell); no dropout;
float32. The 40 + 40 steps are our choice.
"""

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
from dovetail.networks.records import Network

FIRST_RESIDUAL = 2
"""The index of the first layer with a residual connection: the third from the bottom."""


class BidirectionalLayer(nn.Module):
    """Reads the sequence from both ends, with one cell each."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.forwards = LSTMCell(inputs, hidden)
        self.backwards = LSTMCell(inputs, hidden)

    def forward(self, words: Tensor) -> tuple[list[Tensor], LSTMState]:
        """Returns (one [batch, 2 hidden] per step, the last state of the backward cell).

        words is [steps, batch, inputs]. The backward cell's last state is the one at step 0.
        """
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
    """Adds an LSTM cell's output to its input. With `context` 0 the cell reads no context."""

    def __init__(self, hidden: int, context: int = 0) -> None:
        super().__init__()
        self.cell = ContextCell(hidden, context, hidden) if context else LSTMCell(hidden, hidden)

    def forward(self, x: Tensor, *read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (output, h', c') of x [batch, hidden] and `read`: the context, if the cell reads
        one, then h and c."""
        h, c = self.cell(x, *read)
        return x + h, h, c


class GNMT(nn.Module):
    """The model, unrolled over its steps. Raises `ValueError` for less than two layers."""

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
        """Returns the log-probabilities [batch, vocabulary] of the next word, for each target step.

        source and target are [steps, batch]; their numbers of steps may differ.
        """
        words = self.source_embedding(source)
        given = self.target_embedding(target)
        bottom, *above = self.encoder_lstm
        xs, last = bottom(words)
        # The last state of each layer.
        states = [last] + [zero_state(words, self.hidden)] * len(above)
        tops = []
        for x in xs:
            for layer, cell in enumerate(above, 1):
                # A plain cell returns (h, c), a residual one (output, h, c). Either way the output
                # is first, and the state is the last two.
                state = cell(x, *states[layer])
                states[layer] = state[-2:]
                x = state[0]
            tops.append(x)
        memory = self.memory(*tops)
        outputs = []
        for x in given.unbind(0):
            # states[0][0] is still the bottom layer's output of the step before.
            context = self.attention(states[0][0], *memory)
            for layer, cell in enumerate(self.decoder_lstm):
                state = cell(x, context, *states[layer])
                states[layer] = state[-2:]
                x = state[0]
            outputs.append(self.softmax(x))
        return tuple(outputs)


NETWORK = Network(
    name="gnmt",
    paper="Wu et al., 2016, https://arxiv.org/abs/1609.08144",
    description="deep residual LSTM translation model whose decoder layers all read the attention",
    defaults={"layers": 8, "hidden": 1024, "steps": 40, "batch": 128, "vocabulary": 32_000},
    small={"layers": 3, "hidden": 16, "steps": 3, "batch": 2, "vocabulary": 50},
    modules=GNMT,
    examples=translation_examples,
    loss=steps_loss,
)
