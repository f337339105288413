"""Networks of the table, and one step of each: eleven of the papers' and the zoo, and ten others,
of transformers and as people write them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail as dt
from dovetail.frontends import Captured
from dovetail.pipeline import resolve_model

STEPS, BATCH = 40, 16
ZOO = {
    "RandWire": "zoo:randwire?batch=1&size=128&channels=32",
    "NMT": "zoo:nmt?hidden=128&steps=20&batch=16&vocabulary=1000",
    "mixture of experts": (
        "zoo:moe?layers=2&hidden=128&heads=4&key_heads=2&inner=256&experts=4&context=64"
        "&vocabulary=1000"
    ),
    "Inception-V3": "zoo:inception_v3?batch=2&size=149",
    "ViT": "zoo:vit?batch=2&layers=4&hidden=384&heads=6&inner=1536",
    "GPT-2": "zoo:gpt2?layers=4&batch=1&context=128&vocabulary=5000",
    "Llama": (
        "zoo:llama?layers=4&hidden=512&heads=8&key_heads=4&inner=1024&context=64&vocabulary=5000"
    ),
}


@dataclass(frozen=True)
class Case:
    """A module with the arguments of a step, and its loss; without a loss the module returns it."""

    module: nn.Module
    inputs: tuple[Tensor, ...] = ()
    named: dict[str, Tensor] | None = None
    targets: Tensor | None = None
    loss: Callable[..., Tensor] | None = None

    def step(self, train: bool) -> Captured:
        module, named = self.module.train(train), dict(self.named or {})
        if not train:
            named.pop("labels", None)
            return dt.capture(module, *self.inputs, **named)
        own = {} if self.loss is None else {"targets": self.targets, "loss": self.loss}
        return dt.capture(module, *self.inputs, **named, **own, train=dt.Adam(1e-3))


class Cells(nn.Module):
    """Two layers of LSTM cells, step by step, as tutorials write them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        zeros = torch.zeros(inputs.shape[1], inputs.shape[2])
        states = [(zeros, zeros) for _ in self.layers]
        outputs = []
        for x in inputs.unbind(0):
            for number, layer in enumerate(self.layers):
                states[number] = layer(x, states[number])
                x = states[number][0]
            outputs.append(x)
        return torch.stack(outputs)


class Fused(nn.Module):
    """The same by `nn.LSTM`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.lstm(inputs)[0]


class Attention(nn.Module):
    """A block of a GPT, as nanoGPT writes it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, steps, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(found.reshape(batch, steps, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A GPT of 4 blocks of width 128."""

    def __init__(self, vocabulary: int = 1000, steps: int = 64, width: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(steps, width)
        self.blocks = nn.Sequential(*(Attention(width, 4) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class Convolutions(nn.Module):
    """Five of convolution, norm and relu, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, 32, 64, 64, 64, 64)
        parts = [
            part
            for i, o in pairwise(channels)
            for part in (nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
        ]
        self.parts, self.head = nn.Sequential(*parts), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.parts(images).mean((2, 3)))


class Branches(nn.Module):
    """Six blocks of four branches each, as in Inception."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        part = channels // 4

        def branch(size: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(channels, part, 1),
                nn.ReLU(),
                nn.Conv2d(part, part, size, padding=size // 2),
            )

        self.blocks = nn.ModuleList(
            nn.ModuleList(
                (
                    nn.Conv2d(channels, part, 1),
                    branch(3),
                    branch(5),
                    nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(channels, part, 1)),
                )
            )
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.relu(torch.cat([branch(x) for branch in block], 1))
        return x


class UNet(nn.Module):
    """Two levels down and up again, with skips."""

    def __init__(self) -> None:
        super().__init__()

        def double(i: int, o: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU()
            )

        self.first, self.second, self.third = double(3, 16), double(16, 32), double(32, 64)
        self.up1, self.up2 = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.fourth, self.fifth = double(64, 32), double(32, 16)
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.first(images)
        second = self.second(F.max_pool2d(first, 2))
        x = self.up1(self.third(F.max_pool2d(second, 2)))
        x = self.up2(self.fourth(torch.cat((x, second), 1)))
        return self.head(self.fifth(torch.cat((x, first), 1)))


class Tagger(nn.Module):
    """An embedding, a GRU in both directions, and a classifier a step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.gru = nn.GRU(64, 64, batch_first=True, bidirectional=True)
        self.head = nn.Linear(128, 20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(ids))[0])


def of_each_token(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def _lstm(module: nn.Module, width: int) -> Case:
    inputs = torch.randn(STEPS, BATCH, width)
    return Case(module, (inputs,), targets=torch.zeros_like(inputs), loss=F.mse_loss)


def _gpt() -> Case:
    ids = torch.randint(1000, (8, 64))
    return Case(Gpt(), (ids,), targets=torch.randint(1000, (8, 64)), loss=of_each_token)


def _convolutions() -> Case:
    images, classes = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    return Case(Convolutions(), (images,), targets=classes, loss=F.cross_entropy)


def _branches() -> Case:
    images = torch.randn(1, 32, 32, 32)
    return Case(Branches(), (images,), targets=torch.zeros_like(images), loss=F.mse_loss)


def _u_net() -> Case:
    images = torch.randn(2, 3, 64, 64)
    return Case(UNet(), (images,), targets=torch.zeros_like(images), loss=F.mse_loss)


def _tagger() -> Case:
    ids = torch.randint(1000, (8, 30))
    return Case(Tagger(), (ids,), targets=torch.randint(20, (8, 30)), loss=of_each_token)


def _of_transformers(name: str, options: dict[str, Any], **tensors: Tensor) -> Case:
    import transformers

    config = getattr(transformers, f"{name}Config")(**options)
    kinds = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForImageClassification")
    kind = next(k for k in kinds if hasattr(transformers, name + k))
    return Case(getattr(transformers, name + kind)(config), named=tensors)


def _bert() -> Case:
    size = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    options = {**size, "intermediate_size": 512, "vocab_size": 1000}
    ids = torch.randint(1000, (4, 64))
    return _of_transformers("Bert", options, input_ids=ids, labels=ids)


def _t5() -> Case:
    options = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 3, "num_heads": 4}
    ids = torch.randint(1000, (4, 32))
    options |= {"vocab_size": 1000, "decoder_start_token_id": 0}
    return _of_transformers("T5", options, input_ids=ids, decoder_input_ids=ids, labels=ids)


def _convnext() -> Case:
    options = {"hidden_sizes": [24, 48, 96, 192], "depths": [1, 1, 3, 1], "num_labels": 10}
    images, classes = torch.randn(2, 3, 96, 96), torch.randint(10, (2,))
    return _of_transformers("ConvNext", options, pixel_values=images, labels=classes)


def _mamba() -> Case:
    options = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 500}
    ids = torch.randint(500, (2, 24))
    return _of_transformers("Mamba", {**options, "use_cache": False}, input_ids=ids, labels=ids)


def _swin() -> Case:
    options = {"image_size": 64, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
    images, classes = torch.randn(2, 3, 64, 64), torch.randint(10, (2,))
    options |= {"window_size": 4, "num_labels": 10}
    return _of_transformers("Swin", options, pixel_values=images, labels=classes)


def _resnet() -> Case:
    images, classes = torch.randn(2, 3, 224, 224), torch.randint(1000, (2,))
    return _of_transformers("ResNet", {"num_labels": 1000}, pixel_values=images, labels=classes)


OWN: dict[str, Callable[[], Case]] = {
    "LSTM 2 x 128, unrolled": lambda: _lstm(Cells(128), 128),
    "LSTM 2 x 128, nn.LSTM": lambda: _lstm(Fused(128), 128),
    "LSTM 2 x 256, unrolled": lambda: _lstm(Cells(256), 256),
    "LSTM 2 x 256, nn.LSTM": lambda: _lstm(Fused(256), 256),
    "ResNet-50 (transformers)": _resnet,
    "GPT 4 x 128": _gpt,
    "five conv-norm-relu": _convolutions,
    "six blocks of branches": _branches,
    "U-Net": _u_net,
    "GRU tagger": _tagger,
    "BERT (transformers)": _bert,
    "T5 (transformers)": _t5,
    "ConvNeXt (transformers)": _convnext,
    "Mamba (transformers)": _mamba,
    "Swin (transformers)": _swin,
}
NAMES = (*ZOO, *OWN)


def step_of(name: str, train: bool) -> Captured:
    """The step of a network by its name in the table."""
    torch.manual_seed(0)
    if name in OWN:
        return OWN[name]().step(train)
    step = resolve_model(ZOO[name], "adam" if train else "")
    assert isinstance(step, Captured)
    return step
