"""A language model of stacked LSTM layers, unrolled over its steps and written unfused.

    tokens ─► embedding ─► lstm.0 ─► ... ─► lstm.N ─► softmax ─► log-probabilities    (per step)
                             │ h, c           │ h, c
                             ▼                ▼
                         next step        next step

Every cell of every step is its own ops, as a placer of ops wants them: a fused LSTM kernel would
hide from it that layer 0 can be at step 5 while layer 1 is at step 4.

Paper: Jozefowicz et al., "Exploring the Limits of Language Modeling", 2016,
https://arxiv.org/abs/1602.02410, as placed by Mirhoseini et al., "Device Placement Optimization
with Reinforcement Learning", ICML 2017, https://arxiv.org/abs/1706.04972, section 4.1: two layers
of 2048, 40 steps, batch 64. Differences: the placement paper gives no vocabulary, 10,000 is our
choice; no projection and no sampled softmax.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.networks.records import Examples, Network


class LSTMCell(nn.Module):
    """One step of one layer:

    i, f, g, o = split(x W_x + h W_h + b)
    c' = sigmoid(f) c + sigmoid(i) tanh(g)
    h' = sigmoid(o) tanh(c')
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight_x = nn.Parameter(torch.empty(inputs, 4 * hidden))
        self.weight_h = nn.Parameter(torch.empty(hidden, 4 * hidden))
        self.bias = nn.Parameter(torch.empty(4 * hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """(h', c') of x [batch, inputs] and h, c [batch, hidden]."""
        gates = torch.addmm(torch.addmm(self.bias, x, self.weight_x), h, self.weight_h)
        i, f, g, o = gates.chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class Softmax(nn.Module):
    """Log-probabilities [batch, vocabulary] of h [batch, hidden]."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, vocabulary))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.uniform_(self.weight, -(hidden**-0.5), hidden**-0.5)

    def forward(self, h: Tensor) -> Tensor:
        return torch.log_softmax(torch.addmm(self.bias, h, self.weight), dim=1)


class RNNLM(nn.Module):
    """The unrolled model; its input is time-major, so that a step's tokens are contiguous."""

    def __init__(self, layers: int = 2, hidden: int = 2048, vocabulary: int = 10_000) -> None:
        super().__init__()
        self.hidden = hidden
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.ModuleList(LSTMCell(hidden, hidden) for _ in range(layers))
        self.softmax = Softmax(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Per step the log-probabilities [batch, vocabulary] of tokens [steps, batch]."""
        inputs = self.embedding(tokens)
        zeros = inputs.new_zeros(tokens.shape[1], self.hidden)
        states = [(zeros, zeros) for _ in self.lstm]
        outputs = []
        for x in inputs.unbind(0):
            for layer, cell in enumerate(self.lstm):
                states[layer] = cell(x, *states[layer])
                x = states[layer][0]
            outputs.append(self.softmax(x))
        return tuple(outputs)


def rnnlm_loss(outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Mean cross entropy over steps and batch; targets [steps, batch]."""
    losses = [
        nn.functional.nll_loss(output, target)
        for output, target in zip(outputs, targets.unbind(0), strict=True)
    ]
    return torch.stack(losses).mean()


def _module(*, layers: int, hidden: int, vocabulary: int, **_: Any) -> nn.Module:
    return RNNLM(layers, hidden, vocabulary)


def _examples(*, steps: int, batch: int, vocabulary: int, **_: Any) -> Examples:
    tokens, targets = (torch.randint(vocabulary, (steps, batch)) for _ in range(2))
    return (tokens,), (targets,)


NETWORK = Network(
    name="rnnlm",
    paper="Jozefowicz et al., 2016, https://arxiv.org/abs/1602.02410",
    description="LSTM language model, unfused and unrolled",
    defaults={"layers": 2, "hidden": 2048, "steps": 40, "batch": 64, "vocabulary": 10_000},
    small={"layers": 2, "hidden": 16, "steps": 4, "batch": 3, "vocabulary": 50},
    modules=_module,
    examples=_examples,
    loss=rnnlm_loss,
    repeated=(LSTMCell, Softmax),
)
