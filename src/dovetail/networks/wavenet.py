"""WaveNet: dilated causal convolutions with gates, over the samples of a waveform.

                          ┌─► tanh ────┐
    x ─┬─► dilated conv ──┤            x ─┬─► 1x1 ─► + ─► x of the next layer
       │                  └─► sigmoid ─┘  │          ▲
       └──────────────────────────────────┼──────────┘
                                          └─► 1x1 ─► summed over all layers ─► ReLU ─► 1x1
                                                     ─► ReLU ─► 1x1 ─► softmax

Paper: van den Oord et al., "WaveNet: A Generative Model for Raw Audio", 2016,
https://arxiv.org/abs/1609.03499, section 2. Filters read two samples. Dilations double from layer
to layer up to a limit, then begin at 1 again (the paper's example: 1 to 512). The output is a
softmax over 256 values of the mu-law-companded sample.

The paper prints no numbers of channels. 64 residual, 64 gated and 256 skip channels are those of
Arik et al., "Deep Voice: Real-time Neural Text-to-Speech", ICML 2017,
https://arxiv.org/abs/1702.07825. Clips of 7,680 samples are those of van den Oord et al., "Parallel
WaveNet: Fast High-Fidelity Speech Synthesis", 2017, https://arxiv.org/abs/1711.10433, section 5.

Zhou et al., "GDP: Generalized Device Placement for Dataflow Graphs", 2019,
https://arxiv.org/abs/1910.01578, table 1, place it with 2 stacks and 18 layers, and with 4 and 36.
Here `layers` counts the layers of one stack. If theirs counts those of all stacks, one stack has 9.
The dilations of a stack begin at 1 again after every `cycle` layers. A cycle of 9 is our choice,
because 18 and 36 are multiples of it; with the paper's 10 a stack would end within a cycle. A batch
of 8 clips is our choice as well.
Differences: no conditioning; the first convolution reads one-hot samples, so it is two embeddings;
the last layer has no residual output, because nothing would read it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.networks.records import Examples, Network


class FirstConv(nn.Module):
    """The causal convolution of one-hot samples, as the sum of two embeddings: one of each sample,
    and one of the sample before it."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.here = nn.Embedding(classes, channels)
        self.before = nn.Embedding(classes, channels)

    def forward(self, samples: Tensor) -> Tensor:
        """Returns [batch, channels, length] of samples [batch, length]."""
        before = F.pad(self.before(samples[:, :-1]), (0, 0, 1, 0))
        convolved: Tensor = self.here(samples) + before
        return convolved.transpose(1, 2)


class WaveNetLayer(nn.Module):
    """A gated dilated convolution. The `last` one has no residual output: only its skip is read."""

    def __init__(
        self, residual: int, gated: int, skip: int, dilation: int, *, last: bool = False
    ) -> None:
        super().__init__()
        self.dilation = dilation
        self.conv = nn.Conv1d(residual, 2 * gated, 2, dilation=dilation)
        self.residual = None if last else nn.Conv1d(gated, residual, 1)
        self.skip = nn.Conv1d(gated, skip, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (x of the next layer [batch, residual, length], skip [batch, skip, length])."""
        # Padding on the left alone keeps the convolution causal: no output sees a later sample.
        filtered, gate = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, dim=1)
        z = torch.tanh(filtered) * torch.sigmoid(gate)
        return x if self.residual is None else x + self.residual(z), self.skip(z)


class WaveNetStack(nn.Module):
    """Runs layers one after the other, and sums their skips."""

    def __init__(self, layers: Iterable[WaveNetLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (the next stack's x, the sum of the skips)."""
        total = None
        for layer in self.layers:
            x, skip = layer(x)
            total = skip if total is None else total + skip
        assert total is not None
        return x, total


class WaveNet(nn.Module):
    """Maps samples [batch, length] to logits [batch, classes, length] of the sample after each.

    receptive_field   the number of samples that one prediction depends on
    """

    def __init__(
        self,
        *,
        stacks: int,
        layers: int,
        cycle: int,
        residual: int,
        gated: int,
        skip: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.first = FirstConv(classes, residual)
        dilations = [2 ** (n % cycle) for n in range(layers)]
        self.receptive_field = 2 + stacks * sum(dilations)

        def layer(stack: int, n: int) -> WaveNetLayer:
            last = (stack, n) == (stacks - 1, layers - 1)
            return WaveNetLayer(residual, gated, skip, dilations[n], last=last)

        self.stacks = nn.ModuleList(
            WaveNetStack(layer(stack, n) for n in range(layers)) for stack in range(stacks)
        )
        self.output = nn.Sequential(
            nn.ReLU(), nn.Conv1d(skip, skip, 1), nn.ReLU(), nn.Conv1d(skip, classes, 1)
        )

    def forward(self, samples: Tensor) -> Tensor:
        x = self.first(samples)
        totals = []
        for stack in self.stacks:
            x, total = stack(x)
            totals.append(total)
        logits: Tensor = self.output(sum(totals[1:], totals[0]))
        return logits


def wavenet_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy of logits [batch, classes, length] and targets
    [batch, length]."""
    return F.cross_entropy(logits, targets)


def wavenet_examples(*, batch: int, length: int, classes: int) -> Examples:
    wave = torch.randint(classes, (batch, length + 1))
    return (wave[:, :-1].clone(),), (wave[:, 1:].clone(),)


NETWORK = Network(
    name="wavenet",
    paper="van den Oord et al., 2016, https://arxiv.org/abs/1609.03499",
    description="generative model of raw audio of dilated causal convolutions",
    defaults={
        "stacks": 2,
        "layers": 18,
        "cycle": 9,
        "residual": 64,
        "gated": 64,
        "skip": 256,
        "length": 7680,
        "batch": 8,
        "classes": 256,
    },
    small={
        "stacks": 2,
        "layers": 3,
        "cycle": 3,
        "residual": 4,
        "gated": 4,
        "skip": 8,
        "length": 32,
        "batch": 2,
        "classes": 16,
    },
    modules=WaveNet,
    examples=wavenet_examples,
    loss=wavenet_loss,
)
