"""AmoebaNet-D: an evolved image classifier, each of whose cells reads the two cells before it.

    images ─► stem ─► R ─► R ─► N x layers/3 ─► R ─► N x layers/3 ─► R ─► N x layers/3 ─► linear
    size/    2       4    8                    16                   32

Paper: Real, Aggarwal, Huang and Le, "Regularized Evolution for Image Classifier Architecture
Search", AAAI 2019, https://arxiv.org/abs/1802.01548.

* Sizes (L, D), our `layers` and `filters`, and the number of parameters that each should have:
  Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
  NeurIPS 2019, https://arxiv.org/abs/1811.06965, table 1: (18, 208) has 82 M, (18, 416) 318 M,
  (18, 544) 542 M, (36, 544) 1.05 B and (72, 512) 1.8 B.
* Cells: the authors' release, tensorflow/tpu, models/official/amoeba_net. There a normal cell
  outputs its states 0, 3, 4 and 6. The paper draws 4, 5 and 6, but GPipe's parameter counts need
  the release's states.
* Stem and widths: Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant
  Models", 2020, https://arxiv.org/abs/2004.09910. Its benchmark prints 81.5 M, 319.0 M, 542.7 M,
  1.06 B and 1.84 B parameters for the five sizes.

Differences: unlike torchgpipe's, a 3x3 max pool takes the maximum (there it averages), images pass
no ReLU before the first convolution, and any image size works. There is no drop path and no
auxiliary classifier. Images of 224 are those of torchgpipe's benchmark; a batch of 32 is our
choice.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.networks.images import FactorizedReduce, classification_loss, image_examples
from dovetail.networks.records import Network


def _normalised(conv: nn.Conv2d) -> list[nn.Module]:
    """Returns a ReLU, the convolution and its batch normalisation, in this order."""
    return [nn.ReLU(), conv, nn.BatchNorm2d(conv.out_channels)]


def _conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(*_normalised(nn.Conv2d(inputs, outputs, 1, bias=False)))


def none(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduce(channels, channels)


def avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def max_pool_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride, ceil_mode=True)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return nn.Sequential(*_normalised(nn.Conv2d(channels, channels, 1, stride, bias=False)))


def conv_3x3(channels: int, stride: int) -> nn.Module:
    """Returns a 3x3 convolution within a bottleneck of a quarter of the channels."""
    inner = channels // 4
    return nn.Sequential(
        *_normalised(nn.Conv2d(channels, inner, 1, bias=False)),
        *_normalised(nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)),
        *_normalised(nn.Conv2d(inner, channels, 1, bias=False)),
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """Returns a 1x7 and a 7x1 convolution within a bottleneck of a quarter of the channels."""
    inner = channels // 4
    return nn.Sequential(
        *_normalised(nn.Conv2d(channels, inner, 1, bias=False)),
        *_normalised(nn.Conv2d(inner, inner, (1, 7), (1, stride), (0, 3), bias=False)),
        *_normalised(nn.Conv2d(inner, inner, (7, 1), (stride, 1), (3, 0), bias=False)),
        *_normalised(nn.Conv2d(inner, channels, 1, bias=False)),
    )


Operation = Callable[[int, int], nn.Module]
"""A function (channels, stride) -> a module that keeps the number of channels."""
Pair = tuple[int, Operation, int, Operation]
"""Two states, each with its operation. The cell adds the two results; the sum is its next state.
State 0 is the output of the cell before, state 1 the output of the cell before that one."""

NORMAL: tuple[Pair, ...] = (
    (1, conv_1x1, 1, max_pool_3x3),
    (1, none, 0, conv_1x7_7x1),
    (0, conv_1x1, 0, conv_1x7_7x1),
    (2, max_pool_3x3, 2, none),
    (1, avg_pool_3x3, 5, conv_1x1),
)
NORMAL_CONCAT = (0, 3, 4, 6)
REDUCTION: tuple[Pair, ...] = (
    (0, max_pool_2x2, 0, max_pool_3x3),
    (2, none, 1, conv_3x3),
    (2, conv_1x7_7x1, 2, max_pool_3x3),
    (3, none, 1, max_pool_2x2),
    (2, avg_pool_3x3, 3, conv_1x1),
)
REDUCTION_CONCAT = (4, 5, 6)


class Cell(nn.Module):
    """Combines the outputs of the two cells before it.

    before, last   channels of the output of the cell before the last one, and of the last one
    reduction      a reduction cell, which halves the grid; otherwise a normal cell
    reduced        the last cell is a reduction, so `before` has a grid of twice the size
    """

    def __init__(
        self, before: int, last: int, channels: int, *, reduction: bool, reduced: bool
    ) -> None:
        super().__init__()
        self.last = _conv(last, channels)
        self.before = (FactorizedReduce if reduced else _conv)(before, channels)
        pairs = REDUCTION if reduction else NORMAL
        self.concat = REDUCTION_CONCAT if reduction else NORMAL_CONCAT
        self.read = tuple((left, right) for left, _, right, _ in pairs)
        self.outputs = channels * len(self.concat)

        # States 0 and 1 are the cell's inputs. Only what reads them has a stride of 2, because all
        # later states are on the halved grid already.
        def made(state: int, operation: Operation) -> nn.Module:
            return operation(channels, 2 if reduction and state < 2 else 1)

        self.left = nn.ModuleList(made(state, operation) for state, operation, _, _ in pairs)
        self.right = nn.ModuleList(made(state, operation) for _, _, state, operation in pairs)

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        """Returns [batch, outputs, n, n]. Of a reduction, `last` has a grid of 2 n a side."""
        states = [self.last(last), self.before(before)]
        for (a, b), left, right in zip(self.read, self.left, self.right, strict=True):
            states.append(left(states[a]) + right(states[b]))
        return torch.cat([states[state] for state in self.concat], 1)


class AmoebaNetD(nn.Module):
    """Maps images [batch, 3, size, size] to logits [batch, classes].

    layers    L, the number of normal cells, a multiple of 3
    filters   D, a multiple of 16. The stem has D / 4 channels and the first cell D / 2, with
              bottlenecks of D / 8. Each reduction cell doubles the channels

    Raises `ValueError` for other values of `layers` and `filters`.
    """

    def __init__(self, layers: int = 18, filters: int = 208, classes: int = 1000) -> None:
        super().__init__()
        if layers % 3 or filters % 16:
            raise ValueError(
                f"layers is {layers} and filters {filters}, but must be multiples of 3 and of 16"
            )
        channels = before = last = filters // 4
        conv = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.stem = nn.Sequential(conv, nn.BatchNorm2d(channels))
        normal = [False] * (layers // 3)
        reduced = False
        cells = []
        for reduction in [True, True, *normal, True, *normal, True, *normal]:
            channels *= 1 + reduction
            cell = Cell(before, last, channels, reduction=reduction, reduced=reduced)
            before, last, reduced = last, cell.outputs, reduction
            cells.append(cell)
        self.cells = nn.ModuleList(cells)
        self.linear = nn.Linear(last, classes)

    def forward(self, images: Tensor) -> Tensor:
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(before, last)
        x = torch.flatten(F.adaptive_avg_pool2d(last, (1, 1)), 1)
        logits: Tensor = self.linear(x)
        return logits


NETWORK = Network(
    name="amoebanet_d",
    paper="Real et al., AAAI 2019, https://arxiv.org/abs/1802.01548",
    description="evolved image classifier, sized as in GPipe",
    defaults={"batch": 32, "size": 224, "classes": 1000, "layers": 18, "filters": 208},
    small={"batch": 2, "size": 64, "classes": 10, "layers": 3, "filters": 32},
    modules=AmoebaNetD,
    examples=image_examples,
    loss=classification_loss,
)
