"""A translation model: stacked LSTM encoder and decoder with additive attention, unrolled.

    source ─► embedding ─► encoder_lstm.0 ─► ... ─► encoder_lstm.N ─► memory: states x_j, keys U x_j
                                │ last h, c              │ last h, c              │
                                ▼                        ▼          ┌─────────────┘
    target ─► embedding ─► decoder_lstm.0 ─► ... ─► decoder_lstm.N ─┼─► readout ─► softmax
                                ▲                        │ h        ▼      ▲
                                └── context of the next step ── attention ─┘ its context

Papers: Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and
Translate", ICLR 2015, https://arxiv.org/abs/1409.0473; the sizes are those that Mirhoseini et al.
place, "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 4.1: two LSTM layers of 1024, 40 + 40 steps, batch 64 and
32,000 word pieces. Their large variant is hidden=2048, batch=256.

The papers leave two things open, so these are our choice. The context of step i is
c_i = attention(s_{i-1}), where s is the state of the top decoder layer, as in Bahdanau et al., and
the bottom layer reads it. The softmax reads tanh(W [s_i; c_i]).
Differences: LSTM cells where Bahdanau et al. have GRUs, as Mirhoseini et al. place them; an encoder
of one direction; the decoder starts from the last states of the encoder, layer by layer; no maxout
in the readout; all source and target words are given (teacher forcing).
"""

import torch
from torch import Tensor, nn

from dovetail.networks.lstm import (
    AdditiveAttention,
    ContextCell,
    LSTMCell,
    Memory,
    Softmax,
    steps_loss,
    translation_examples,
    zero_state,
)
from dovetail.networks.records import Network


class Readout(nn.Module):
    """Maps the state s and the context c, both [batch, hidden], to tanh(W [s; c])."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, s: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat([s, context], dim=1)))


class NMT(nn.Module):
    """The model, unrolled over its steps."""

    def __init__(self, layers: int = 2, hidden: int = 1024, vocabulary: int = 32_000) -> None:
        super().__init__()
        self.hidden = hidden
        self.source_embedding = nn.Embedding(vocabulary, hidden)
        self.target_embedding = nn.Embedding(vocabulary, hidden)
        self.encoder_lstm = nn.ModuleList(LSTMCell(hidden, hidden) for _ in range(layers))
        self.memory = Memory(hidden)
        self.attention = AdditiveAttention(hidden)
        self.decoder_lstm = nn.ModuleList(
            LSTMCell(hidden, hidden) if layer else ContextCell(hidden, hidden, hidden)
            for layer in range(layers)
        )
        self.readout = Readout(hidden)
        self.softmax = Softmax(hidden, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        """Returns the log-probabilities [batch, vocabulary] of the next word, for each target step.

        source and target are [steps, batch]; their numbers of steps may differ.
        """
        words = self.source_embedding(source)
        given = self.target_embedding(target)
        states = [zero_state(words, self.hidden)] * len(self.encoder_lstm)
        tops = []
        for x in words.unbind(0):
            for layer, cell in enumerate(self.encoder_lstm):
                states[layer] = cell(x, *states[layer])
                x = states[layer][0]
            tops.append(x)
        memory = self.memory(*tops)
        outputs = []
        for x in given.unbind(0):
            context = self.attention(states[-1][0], *memory)
            for layer, cell in enumerate(self.decoder_lstm):
                read = (x,) if layer else (x, context)
                states[layer] = cell(*read, *states[layer])
                x = states[layer][0]
            outputs.append(self.softmax(self.readout(x, context)))
        return tuple(outputs)


NETWORK = Network(
    name="nmt",
    paper="Bahdanau et al., ICLR 2015, https://arxiv.org/abs/1409.0473",
    description="LSTM translation model with additive attention, unfused and unrolled",
    defaults={"layers": 2, "hidden": 1024, "steps": 40, "batch": 64, "vocabulary": 32_000},
    small={"layers": 2, "hidden": 16, "steps": 4, "batch": 3, "vocabulary": 50},
    modules=NMT,
    examples=translation_examples,
    loss=steps_loss,
)
