"""Small models as transformers' users have them: layers that share what is computed once."""

import torch
from torch import nn

import dovetail as dt

WIDTH = 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cos, mask):
        turned = self.up(self.norm(x)) * cos.unsqueeze(0)
        return x + self.down(torch.where(mask, turned, 0.0))


class Rotary(nn.Module):
    def forward(self, x):
        places = torch.arange(x.shape[1]).unsqueeze(1).expand(-1, WIDTH)
        return torch.cos(places * 0.1), (places >= 0).unsqueeze(0)


class Decoder(nn.Module):
    """`layers` layers that share cosines and a mask; it says itself what not to split."""

    _no_split_modules = ("Layer",)

    def __init__(self, layers=4):
        super().__init__()
        self.embedding, self.rotary = nn.Embedding(32, WIDTH), Rotary()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens):
        x = self.embedding(tokens)
        cos, mask = self.rotary(x)
        for layer in self.layers:
            x = layer(x, cos, mask)
        return self.head(x)


class Net(nn.Module):
    """A U with skips that its outermost module joins."""

    def __init__(self):
        super().__init__()
        self.down, self.low = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skip = self.down(x)
        return self.out(torch.cat([self.up(self.low(self.pool(skip))), skip], 1))


class Scaled(nn.Module):
    """The outermost module joins its input and its own parameter with what children made."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(torch.relu(self.a(x) * self.scale) + x)


class Tied(nn.Module):
    """Embedding and head read one parameter."""

    def __init__(self):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.middle(self.embedding(tokens))))


class LentTable(nn.Module):
    """A part that can be split reads the embedding's weight itself, after layers of its own."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, WIDTH), nn.Module()
        self.head.table = self.embedding.weight
        self.head.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head.forward = self.words

    def words(self, x):
        for layer in self.head.layers:
            x = layer(x)
        return x @ self.head.table.T

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class Twice(nn.Module):
    """One module has two names, of which the other is in a part that calls it, too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH)
        self.encoder, self.decoder = nn.Module(), nn.Module()
        for part in (self.encoder, self.decoder):
            part.words = self.embedding
            part.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.decoder.places = nn.Parameter(torch.ones(8, WIDTH))

    def forward(self, tokens):
        x = self.encoder.words(tokens)
        for layer in self.encoder.layers:
            x = layer(x).relu()
        y = self.decoder.words(tokens) + self.decoder.places
        for layer in self.decoder.layers:
            y = layer(y + x).relu()
        return y


class Indexed(nn.Module):
    """The outermost module picks products of what children made by indices that it makes itself."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        first, second = torch.tril_indices(3, 3, -1)
        rows = torch.stack([x, self.a(x), self.b(x)], 1)
        return self.out((rows @ rows.transpose(1, 2))[:, first, second])


class Weighed(nn.Module):
    """A split module computes with its own parameter alone, then joins that with its input."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.share = nn.Parameter(torch.zeros(()))
        self.inner.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.inner.forward = self.within
        self.head = nn.Linear(WIDTH, 4)

    def within(self, x):
        y = x
        for layer in self.inner.layers:
            y = layer(y).relu()
        return y + (1 + self.inner.share) * x

    def forward(self, x):
        return self.head(self.inner(x))


def tokens():
    return torch.arange(12).reshape(2, 6) % 32


MODELS = {
    "decoder": lambda: (Decoder(), tokens()),
    "net": lambda: (Net(), torch.ones(1, 3, 8, 8)),
    "scaled": lambda: (Scaled(), torch.ones(2, WIDTH)),
    "indexed": lambda: (Indexed(), torch.ones(2, WIDTH)),
    "weighed": lambda: (Weighed(), torch.ones(2, WIDTH)),
    "tied": lambda: (Tied(), tokens()),
    "lent_table": lambda: (LentTable(), torch.arange(8)[None]),
    "twice": lambda: (Twice(), torch.arange(8)[None]),
    "transformer": lambda: (
        nn.Transformer(WIDTH, 2, 1, 1, WIDTH).eval(),
        (torch.ones(3, 2, WIDTH), torch.ones(2, 2, WIDTH)),
    ),
    "lstm": lambda: (nn.LSTM(WIDTH, WIDTH, 2), torch.ones(3, 2, WIDTH)),
    "mlp": lambda: (
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5))),
        torch.ones(2, WIDTH),
    ),
}


def captured_model(name):
    """One of `MODELS`, captured. An example that is a tuple is of several arguments."""
    module, example = MODELS[name]()
    return dt.capture(module, *(example if isinstance(example, tuple) else (example,)))
