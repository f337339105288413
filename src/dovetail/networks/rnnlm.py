"""A language model of stacked LSTM layers, unrolled over its steps and written unfused.

    tokens ─► embedding ─► lstm.0 ─► ... ─► lstm.N ─► softmax ─► log-probabilities    (per step)
                             │ h, c           │ h, c
                             ▼                ▼
                         next step        next step

Paper: Jozefowicz et al., "Exploring the Limits of Language Modeling", 2016,
https://arxiv.org/abs/1602.02410. The sizes are those that Mirhoseini et al. place, "Device
Placement Optimization with Reinforcement Learning", ICML 2017, https://arxiv.org/abs/1706.04972,
section 4.1: two layers of 2048, 40 steps, batch 64.
Differences: no projection and no sampled softmax. Mirhoseini et al. give no vocabulary; 10,000 is
our choice.
"""

import torch
from torch import Tensor, nn

from dovetail.networks.lstm import LSTMCell, Softmax, steps_loss, zero_state
from dovetail.networks.records import Examples, Network


class RNNLM(nn.Module):
    """The model, unrolled over its steps."""

    def __init__(self, layers: int = 2, hidden: int = 2048, vocabulary: int = 10_000) -> None:
        super().__init__()
        self.hidden = hidden
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.ModuleList(LSTMCell(hidden, hidden) for _ in range(layers))
        self.softmax = Softmax(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Returns the log-probabilities [batch, vocabulary] of the next token, for each step of
        tokens [steps, batch]."""
        inputs = self.embedding(tokens)
        states = [zero_state(inputs, self.hidden)] * len(self.lstm)
        outputs = []
        for x in inputs.unbind(0):
            for layer, cell in enumerate(self.lstm):
                states[layer] = cell(x, *states[layer])
                x = states[layer][0]
            outputs.append(self.softmax(x))
        return tuple(outputs)


def language_examples(*, steps: int, batch: int, vocabulary: int) -> Examples:
    tokens, targets = (torch.randint(vocabulary, (steps, batch)) for _ in range(2))
    return (tokens,), (targets,)


NETWORK = Network(
    name="rnnlm",
    paper="Jozefowicz et al., 2016, https://arxiv.org/abs/1602.02410",
    description="LSTM language model, unfused and unrolled",
    defaults={"layers": 2, "hidden": 2048, "steps": 40, "batch": 64, "vocabulary": 10_000},
    small={"layers": 2, "hidden": 16, "steps": 4, "batch": 3, "vocabulary": 50},
    modules=RNNLM,
    examples=language_examples,
    loss=steps_loss,
)
