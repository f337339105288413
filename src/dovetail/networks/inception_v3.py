"""Inception-V3: a deep convolutional network whose blocks branch up to six ways.

    299x299x3 ─► stem ─► 3 x A (35x35) ─► B ─► 4 x C (17x17) ─► D ─► 2 x E (8x8) ─► pool ─► linear
                                                        └─► auxiliary classifier (training)

Paper: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016,
https://arxiv.org/abs/1512.00567. The widths are those of torchvision's `inception_v3`, and so is
the number of parameters: 23,834,568, or 27,161,264 with the auxiliary classifier.
Differences: the auxiliary classifier is off by default; `width` scales every number of channels
(rounded, at least 1), so that tests can use a small network.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.networks.images import auxiliary_loss, image_examples
from dovetail.networks.records import Network

Pair = tuple[int, int]


class Conv(nn.Module):
    """Convolution, batch normalisation, ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | Pair,
        stride: int = 1,
        padding: int | Pair = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)


def _wide(inputs: int, outputs: int) -> Conv:
    return Conv(inputs, outputs, (1, 7), padding=(0, 3))


def _tall(inputs: int, outputs: int) -> Conv:
    return Conv(inputs, outputs, (7, 1), padding=(3, 0))


class BlockA(nn.Module):
    """On the 35x35 grid: branches of 1x1, 5x5, two 3x3 convolutions, and average pooling."""

    def __init__(self, inputs: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        w48, w64, w96, pooled = widths
        self.branch1x1 = Conv(inputs, w64, 1)
        self.branch5x5 = nn.Sequential(Conv(inputs, w48, 1), Conv(w48, w64, 5, padding=2))
        self.branch3x3 = nn.Sequential(
            Conv(inputs, w64, 1), Conv(w64, w96, 3, padding=1), Conv(w96, w96, 3, padding=1)
        )
        self.branch_pool = Conv(inputs, pooled, 1)
        self.outputs = 2 * w64 + w96 + pooled

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.branch1x1(x), self.branch5x5(x), self.branch3x3(x)]
        return torch.cat([*branches, self.branch_pool(_average(x))], 1)


class BlockB(nn.Module):
    """From the 35x35 grid to 17x17: branches of one 3x3, two 3x3, and max pooling."""

    def __init__(self, inputs: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        w64, w96, w384 = widths
        self.branch3x3 = Conv(inputs, w384, 3, stride=2)
        self.branch3x3_double = nn.Sequential(
            Conv(inputs, w64, 1), Conv(w64, w96, 3, padding=1), Conv(w96, w96, 3, stride=2)
        )
        self.outputs = w384 + w96 + inputs

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(x, kernel_size=3, stride=2)
        return torch.cat([self.branch3x3(x), self.branch3x3_double(x), pooled], 1)


class BlockC(nn.Module):
    """On the 17x17 grid: 7x7 convolutions, each factored into 1x7 and 7x1."""

    def __init__(self, inputs: int, inner: int, w192: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(inputs, w192, 1)
        self.branch7x7 = nn.Sequential(
            Conv(inputs, inner, 1), _wide(inner, inner), _tall(inner, w192)
        )
        self.branch7x7_double = nn.Sequential(
            Conv(inputs, inner, 1),
            _tall(inner, inner),
            _wide(inner, inner),
            _tall(inner, inner),
            _wide(inner, w192),
        )
        self.branch_pool = Conv(inputs, w192, 1)
        self.outputs = 4 * w192

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.branch1x1(x), self.branch7x7(x), self.branch7x7_double(x)]
        return torch.cat([*branches, self.branch_pool(_average(x))], 1)


class BlockD(nn.Module):
    """From the 17x17 grid to 8x8: branches of a 3x3, a factored 7x7, and max pooling."""

    def __init__(self, inputs: int, w192: int, w320: int) -> None:
        super().__init__()
        self.branch3x3 = nn.Sequential(Conv(inputs, w192, 1), Conv(w192, w320, 3, stride=2))
        self.branch7x7 = nn.Sequential(
            Conv(inputs, w192, 1),
            _wide(w192, w192),
            _tall(w192, w192),
            Conv(w192, w192, 3, stride=2),
        )
        self.outputs = w320 + w192 + inputs

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(x, kernel_size=3, stride=2)
        return torch.cat([self.branch3x3(x), self.branch7x7(x), pooled], 1)


class BlockE(nn.Module):
    """On the 8x8 grid: 3x3 convolutions, each split into a 1x3 and a 3x1 side by side."""

    def __init__(self, inputs: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        w192, w320, w384, w448 = widths
        self.branch1x1 = Conv(inputs, w320, 1)
        self.branch3x3 = Conv(inputs, w384, 1)
        self.branch3x3_split = _Split(w384)
        self.branch3x3_double = nn.Sequential(Conv(inputs, w448, 1), Conv(w448, w384, 3, padding=1))
        self.branch3x3_double_split = _Split(w384)
        self.branch_pool = Conv(inputs, w192, 1)
        self.outputs = w320 + 4 * w384 + w192

    def forward(self, x: Tensor) -> Tensor:
        branches = [
            self.branch1x1(x),
            self.branch3x3_split(self.branch3x3(x)),
            self.branch3x3_double_split(self.branch3x3_double(x)),
        ]
        return torch.cat([*branches, self.branch_pool(_average(x))], 1)


class _Split(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = Conv(width, width, (1, 3), padding=(0, 1))
        self.tall = Conv(width, width, (3, 1), padding=(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.wide(x), self.tall(x)], 1)


class InceptionAuxiliary(nn.Module):
    """The second classifier, which reads the 17x17 grid in training."""

    def __init__(self, inputs: int, w128: int, w768: int, classes: int) -> None:
        super().__init__()
        self.conv0 = Conv(inputs, w128, 1)
        self.conv1 = Conv(w128, w768, 5)
        self.fc = nn.Linear(w768, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, kernel_size=5, stride=3)
        x = F.adaptive_avg_pool2d(self.conv1(self.conv0(x)), (1, 1))
        return self.fc(torch.flatten(x, 1))  # type: ignore[no-any-return]


class InceptionV3(nn.Module):
    """Maps images [batch, 3, size, size] to logits [batch, classes]. `size` is at least 75.

    With `aux` it returns (logits, auxiliary logits) in training mode, and `size` is at least 203.
    """

    def __init__(
        self, classes: int = 1000, *, aux: bool = False, width: float = 1.0, dropout: float = 0.5
    ) -> None:
        super().__init__()

        def scaled(*widths: int) -> tuple[int, ...]:
            return tuple(max(1, round(width * w)) for w in widths)

        w32, w64, w80, w192, w320 = scaled(32, 64, 80, 192, 320)
        self.stem = nn.Sequential(
            Conv(3, w32, 3, stride=2),
            Conv(w32, w32, 3),
            Conv(w32, w64, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            Conv(w64, w80, 1),
            Conv(w80, w192, 3),
            nn.MaxPool2d(3, stride=2),
        )
        grid35 = [BlockA(w192, scaled(48, 64, 96, 32))]
        for _ in range(2):
            grid35.append(BlockA(grid35[-1].outputs, scaled(48, 64, 96, 64)))
        down17 = BlockB(grid35[-1].outputs, scaled(64, 96, 384))
        grid17: list[BlockB | BlockC] = [down17]
        for inner in scaled(128, 160, 160, 192):
            grid17.append(BlockC(grid17[-1].outputs, inner, w192))
        self.blocks = nn.Sequential(*grid35, *grid17)
        channels = grid17[-1].outputs
        w128, w768 = scaled(128, 768)
        self.aux = InceptionAuxiliary(channels, w128, w768, classes) if aux else None
        down8 = BlockD(channels, w192, w320)
        first = BlockE(down8.outputs, scaled(192, 320, 384, 448))
        second = BlockE(first.outputs, scaled(192, 320, 384, 448))
        self.tail = nn.Sequential(down8, first, second)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(second.outputs, classes)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.blocks(self.stem(images))
        aux = self.aux(x) if self.aux is not None and self.training else None
        x = F.adaptive_avg_pool2d(self.tail(x), (1, 1))
        logits: Tensor = self.fc(torch.flatten(self.dropout(x), 1))
        return logits if aux is None else (logits, aux)


NETWORK = Network(
    name="inception_v3",
    paper="Szegedy et al., CVPR 2016, https://arxiv.org/abs/1512.00567",
    description="image classifier whose blocks branch up to six ways",
    defaults={
        "batch": 32,
        "size": 299,
        "classes": 1000,
        "aux": False,
        "width": 1.0,
        "dropout": 0.5,
    },
    small={"batch": 2, "size": 75, "classes": 10, "width": 0.1},
    modules=InceptionV3,
    examples=image_examples,
    loss=auxiliary_loss,
)
