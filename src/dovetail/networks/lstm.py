"""Parts that the recurrent networks share: an LSTM cell, attention and softmax, step by step.

Every cell of every step has its own ops, so that a placer can place them. A fused LSTM kernel would
hide that layer 0 can be at step 5 while layer 1 is at step 4. Sequences are time-major,
[steps, batch], so that the inputs of a step are contiguous.

Papers: Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 1997,
https://doi.org/10.1162/neco.1997.9.8.1735; Bahdanau, Cho and Bengio, "Neural Machine Translation
by Jointly Learning to Align and Translate", ICLR 2015, https://arxiv.org/abs/1409.0473, section
3.1 and appendix A.1.2.
Differences: no peepholes; the weights of the four gates are one matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dovetail.networks.records import Examples

LSTMState = tuple[Tensor, Tensor]


class LSTMCell(nn.Module):
    """Computes one step of one layer.

        i, f, g, o = split(x W_x + h W_h + b)
        c' = sigmoid(f) c + sigmoid(i) tanh(g)
        h' = sigmoid(o) tanh(c')

    W_x, W_h and b are `weight_x`, `weight_h` and `bias`.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight_x = nn.Parameter(torch.empty(inputs, 4 * hidden))
        self.weight_h = nn.Parameter(torch.empty(hidden, 4 * hidden))
        self.bias = nn.Parameter(torch.empty(4 * hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """Returns (h', c'), each [batch, hidden], of x [batch, inputs] and h, c [batch, hidden]."""
        gates = torch.addmm(torch.addmm(self.bias, x, self.weight_x), h, self.weight_h)
        i, f, g, o = gates.chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class ContextCell(nn.Module):
    """An LSTM cell that reads its input and an attention context, one after the other."""

    def __init__(self, inputs: int, context: int, hidden: int) -> None:
        super().__init__()
        self.cell = LSTMCell(inputs + context, hidden)

    def forward(self, x: Tensor, context: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """Returns (h', c') of x [batch, inputs], context [batch, context], and h, c [batch, hidden]
        as they were before the step."""
        state: LSTMState = self.cell(torch.cat([x, context], dim=1), h, c)
        return state


class Memory(nn.Module):
    """Computes what the decoder attends to, once for a sequence: states x_j and keys U x_j."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.keys = nn.Linear(hidden, hidden, bias=False)

    def forward(self, *states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (states, keys), both [batch, steps, hidden]. It is given one state
        [batch, hidden] for each step."""
        stacked = torch.stack(states, dim=1)
        return stacked, self.keys(stacked)


class AdditiveAttention(nn.Module):
    """Computes one attention step. s is the decoder's state, x_j the encoder's state at step j.

        e_j = v . tanh(W s + U x_j)
        a   = softmax(e)
        context = sum_j a_j x_j

    W is `query`, v is `energy`, and `Memory` has computed U x_j.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.energy = nn.Parameter(torch.empty(hidden))
        nn.init.uniform_(self.energy, -(hidden**-0.5), hidden**-0.5)

    def forward(self, s: Tensor, states: Tensor, keys: Tensor) -> Tensor:
        """Returns the context [batch, hidden] of s [batch, hidden] and what `Memory` returned."""
        hidden = torch.tanh(keys + self.query(s).unsqueeze(1))
        weights = torch.softmax(hidden @ self.energy, dim=1)
        return torch.bmm(weights.unsqueeze(1), states).squeeze(1)


class Softmax(nn.Module):
    """Maps h [batch, hidden] to log-probabilities [batch, vocabulary]."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, vocabulary))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.uniform_(self.weight, -(hidden**-0.5), hidden**-0.5)

    def forward(self, h: Tensor) -> Tensor:
        return torch.log_softmax(torch.addmm(self.bias, h, self.weight), dim=1)


def zero_state(x: Tensor, hidden: int) -> LSTMState:
    """Returns (h, c), each [batch, hidden], before the first step of x [steps, batch, inputs]."""
    zeros = x.new_zeros(x.shape[1], hidden)
    return zeros, zeros


def steps_loss(outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Returns the mean cross entropy over steps and batch.

    `outputs` holds the log-probabilities [batch, vocabulary] of each step; targets is
    [steps, batch].
    """
    losses = [
        nn.functional.nll_loss(output, target)
        for output, target in zip(outputs, targets.unbind(0), strict=True)
    ]
    return torch.stack(losses).mean()


def translation_examples(steps: int, batch: int, vocabulary: int) -> Examples:
    """Draws ((source words, target words), (next target words,)), each [steps, batch]."""
    source, target, following = (torch.randint(vocabulary, (steps, batch)) for _ in range(3))
    return (source, target), (following,)
