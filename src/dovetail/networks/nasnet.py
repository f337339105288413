"""NASNet-A: an image classifier of cells found by search, each of which reads the two before it.

    images ─► stem ─► S ─► S ─► N cells ─► R ─► N cells ─► R ─► N cells ─► linear
    size/    2       4    8               16              32
                                                    └─► auxiliary classifier (training)

Paper: Zoph, Vasudevan, Shlens and Le, "Learning Transferable Architectures for Scalable Image
Recognition", CVPR 2018, https://arxiv.org/abs/1707.07012, figure 4 and appendix A. The large model
of table 2, 6 cells @ 4032 filters, has 88.9 M parameters and 23.8 G multiply-adds; the mobile model
of table 3, 4 @ 1056, has 5.3 M and 564 M.

The stem, the widths and which cells are read are those of the authors' release in
tensorflow/models, slim/nets. With 1,000 classes that makes 88,753,150 and 5,289,978 parameters.
The paper's 88.9 M also counts the moving averages of the normalisations: 88,949,818.
Differences: the auxiliary classifier is off by default; grids are padded alike on all sides, where
the release pads one more at the end of even grids; no drop path.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.networks.images import FactorizedReduce, auxiliary_loss, image_examples
from dovetail.networks.records import Network

EPS = 0.001
"""Every batch normalisation has this epsilon."""


class Squeeze(nn.Sequential):
    """A ReLU, a 1x1 convolution and its batch normalisation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs, eps=EPS)
        )


class Separable(nn.Sequential):
    """Two separable convolutions. Each is a ReLU, a depthwise and a 1x1 convolution, and a batch
    normalisation. Only the first has the stride."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        modules: list[nn.Module] = []
        for channels, step in ((inputs, stride), (outputs, 1)):
            modules += [
                nn.ReLU(),
                nn.Conv2d(
                    channels, channels, kernel, step, kernel // 2, groups=channels, bias=False
                ),
                nn.Conv2d(channels, outputs, 1, bias=False),
                nn.BatchNorm2d(outputs, eps=EPS),
            ]
        super().__init__(*modules)


def _average(stride: int = 1) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


class NormalCell(nn.Module):
    """Returns 6 x `channels` channels on the grid of the last cell.

    before, last   channels of the output of the cell before the last one, and of the last one
    reduced        `before` has a grid of twice the size
    """

    def __init__(self, before: int, last: int, channels: int, *, reduced: bool) -> None:
        super().__init__()
        self.before: nn.Module = (
            FactorizedReduce(before, channels, EPS) if reduced else Squeeze(before, channels)
        )
        self.last = Squeeze(last, channels)
        self.last_5x5 = Separable(channels, channels, 5, 1)
        self.before_3x3 = Separable(channels, channels, 3, 1)
        self.before_5x5 = Separable(channels, channels, 5, 1)
        self.before_3x3_too = Separable(channels, channels, 3, 1)
        self.last_3x3 = Separable(channels, channels, 3, 1)
        self.average = _average()
        self.outputs = 6 * channels

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        before, last = self.before(before), self.last(last)
        states = [
            before,
            self.last_5x5(last) + self.before_3x3(before),
            self.before_5x5(before) + self.before_3x3_too(before),
            self.average(last) + before,
            self.average(before) + self.average(before),
            self.last_3x3(last) + last,
        ]
        return torch.cat(states, 1)


class ReductionCell(nn.Module):
    """Returns 4 x `channels` channels on half the grid of the last cell.

    before, last   channels of the output of the cell before the last one, and of the last one.
                   The first cell of the network has no cell before it. For it `before` is None, and
                   it reads the stem's output twice, once through `Squeeze` and once unchanged
    reduced        `before` has a grid of twice the size
    """

    def __init__(
        self, before: int | None, last: int, channels: int, *, reduced: bool = False
    ) -> None:
        super().__init__()
        self.before: nn.Module = nn.Identity()
        if before is not None:
            self.before = (
                FactorizedReduce(before, channels, EPS) if reduced else Squeeze(before, channels)
            )
        read = last if before is None else channels
        self.last = Squeeze(last, channels)
        self.last_5x5 = Separable(channels, channels, 5, 2)
        self.before_7x7 = Separable(read, channels, 7, 2)
        self.before_7x7_too = Separable(read, channels, 7, 2)
        self.before_5x5 = Separable(read, channels, 5, 2)
        self.sum_3x3 = Separable(channels, channels, 3, 1)
        self.maximum = nn.MaxPool2d(3, 2, padding=1)
        self.average = _average(2)
        self.sum_average = _average()
        self.outputs = 4 * channels

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        before, last = self.before(before), self.last(last)
        first = self.last_5x5(last) + self.before_7x7(before)
        second = self.maximum(last) + self.before_7x7_too(before)
        third = self.average(last) + self.before_5x5(before)
        fourth = self.sum_average(first) + second
        fifth = self.sum_3x3(first) + self.maximum(last)
        return torch.cat([second, third, fourth, fifth], 1)


class NASNetAuxiliary(nn.Module):
    """The second classifier, which reads the grid before the last reduction in training.

    grid   size of that grid, of one side
    """

    def __init__(self, inputs: int, grid: int, classes: int) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(inputs, 128, 1, bias=False)
        self.bn0 = nn.BatchNorm2d(128, eps=EPS)
        self.conv1 = nn.Conv2d(128, 768, (grid - 5) // 3 + 1, bias=False)
        self.bn1 = nn.BatchNorm2d(768, eps=EPS)
        self.linear = nn.Linear(768, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(x), kernel_size=5, stride=3)
        x = F.relu(self.bn0(self.conv0(x)))
        x = F.relu(self.bn1(self.conv1(x)))
        logits: Tensor = self.linear(torch.flatten(x, 1))
        return logits


class NASNetA(nn.Module):
    """Maps images [batch, 3, size, size] to logits [batch, classes].

    With `aux` it returns (logits, auxiliary logits) in training mode, and `size` is at least 67.

    cells      normal cells between two reductions, the paper's N
    filters    channels of the last cell, a multiple of 96
    stem       channels of the first convolution
    skip       which cell the first cell after a reduction reads beside the reduction's output:
               with `skip` the second one before the reduction, otherwise the one directly before it

    Raises `ValueError` for other values of `filters`, and for a `size` that is too small for `aux`.
    """

    def __init__(
        self,
        *,
        cells: int,
        filters: int,
        stem: int,
        skip: bool,
        size: int,
        classes: int,
        aux: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        if filters % 96:
            raise ValueError(f"filters is {filters}, but must be a multiple of 96")
        if aux and size < 67:
            raise ValueError(
                f"size is {size}, but must be at least 67 for the auxiliary classifier"
            )
        channels = filters // 24
        self.skip = skip
        self.stem = nn.Sequential(
            nn.Conv2d(3, stem, 3, stride=2, bias=False), nn.BatchNorm2d(stem, eps=EPS)
        )
        first = ReductionCell(None, stem, channels // 4)
        second = ReductionCell(stem, first.outputs, channels // 2, reduced=True)
        self.stem_cells = nn.ModuleList([first, second])
        widths = [first.outputs, second.outputs]
        self.reductions, self.stages = nn.ModuleList(), nn.ModuleList()
        for stage in range(3):
            beside = widths[-2]
            if stage:
                channels *= 2
                self.reductions.append(ReductionCell(widths[-2], widths[-1], channels))
                beside = widths[-2] if skip else widths[-1]
                widths.append(4 * channels)
            stage_cells = []
            for n in range(cells):
                before = widths[-2] if n else beside
                stage_cells.append(NormalCell(before, widths[-1], channels, reduced=n == 0))
                widths.append(stage_cells[-1].outputs)
            self.stages.append(nn.ModuleList(stage_cells))
        # One side of the grid after the stem, and after three reductions, which round up.
        grid = (size - 1) // 2
        for _ in range(3):
            grid = (grid + 1) // 2
        self.aux = NASNetAuxiliary(6 * channels // 2, grid, classes) if aux else None
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(filters, classes)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(images)
        first, second = self.stem_cells
        outputs = [x, first(x, x)]
        outputs.append(second(*outputs))
        aux = None
        for stage, cells in enumerate(self.stages):
            beside = outputs[-2]
            if stage:
                if stage == 2 and self.aux is not None and self.training:
                    aux = self.aux(outputs[-1])
                beside = outputs[-2] if self.skip else outputs[-1]
                outputs.append(self.reductions[stage - 1](*outputs[-2:]))
            for n, cell in enumerate(cells.children()):
                outputs.append(cell(outputs[-2] if n else beside, outputs[-1]))
        x = F.adaptive_avg_pool2d(F.relu(outputs[-1]), (1, 1))
        logits: Tensor = self.linear(self.dropout(torch.flatten(x, 1)))
        return logits if aux is None else (logits, aux)


NETWORK_LARGE = Network(
    name="nasnet_a_large",
    paper="Zoph et al., CVPR 2018, https://arxiv.org/abs/1707.07012",
    description="image classifier of cells found by search",
    defaults={
        "batch": 16,
        "size": 331,
        "classes": 1000,
        "cells": 6,
        "filters": 4032,
        "stem": 96,
        "skip": True,
        "aux": False,
        "dropout": 0.5,
    },
    small={"batch": 2, "size": 40, "classes": 10, "cells": 1, "filters": 96, "stem": 4},
    modules=NASNetA,
    examples=image_examples,
    loss=auxiliary_loss,
)
NETWORK_MOBILE = Network(
    name="nasnet_a_mobile",
    paper="Zoph et al., CVPR 2018, https://arxiv.org/abs/1707.07012",
    description="NASNet-A of a size for phones",
    defaults={
        "batch": 32,
        "size": 224,
        "classes": 1000,
        "cells": 4,
        "filters": 1056,
        "stem": 32,
        "skip": False,
        "aux": False,
        "dropout": 0.5,
    },
    small={"batch": 2, "size": 40, "classes": 10, "cells": 1, "filters": 96, "stem": 4},
    modules=NASNetA,
    examples=image_examples,
    loss=auxiliary_loss,
)
