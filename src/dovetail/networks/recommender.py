"""A two-tower recommender: it maps users and items to vectors, and learns which belong together.

    watches  ─► item embedding, mean ─┐
    searches ─► word embedding, mean ─┼─► user.mlp ─► unit vector u ─┐
    features ─────────────────────────┘                              ├─► u v^T / temperature
    item     ─► item embedding ─────────► item.mlp ─► unit vector v ─┘   [batch, batch]

Papers:

* Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", RecSys
  2019, https://doi.org/10.1145/3298689.3346996, section 3: towers of 1024, 512 and 128, item
  embeddings that both towers share, and an in-batch softmax that is corrected by each item's
  probability of being in a batch.
* Covington, Adams and Sargin, "Deep Neural Networks for YouTube Recommendations", RecSys 2016,
  https://doi.org/10.1145/2959100.2959190, section 3: a user is described by the means of 50 watches
  and of 50 search words; 1 M items and 1 M words have embeddings of 256.

Differences: the network combines the two papers; the items' probabilities are given, not estimated
from a stream. The number of features, the temperature and the batch are our choice.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.networks.records import Examples, Network

TEMPERATURE = 0.05
"""Scores are divided by this before the softmax of the loss. The value is our choice."""


class FeatureTower(nn.Module):
    """Maps inputs, [batch, inputs] when joined, to unit vectors [batch, last width]."""

    def __init__(self, inputs: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in widths:
            layers += [nn.Linear(inputs, width), nn.ReLU()]
            inputs = width
        self.mlp = nn.Sequential(*layers[:-1])

    def forward(self, *inputs: Tensor) -> Tensor:
        return F.normalize(self.mlp(torch.cat(inputs, dim=1)), dim=1)


class TwoTower(nn.Module):
    """Returns the scores [batch, batch] of every user of a batch (row) with every item (column)."""

    def __init__(
        self, *, items: int, words: int, embedding: int, features: int, width: int, vector: int
    ) -> None:
        super().__init__()
        self.items = nn.Embedding(items, embedding)
        self.words = nn.Embedding(words, embedding)
        for table in (self.items, self.words):
            nn.init.normal_(table.weight, std=embedding**-0.5)
        widths = (width, max(1, width // 2), vector)
        self.user = FeatureTower(2 * embedding + features, widths)
        self.item = FeatureTower(embedding, widths)

    def forward(self, watches: Tensor, searches: Tensor, features: Tensor, item: Tensor) -> Tensor:
        """Returns the scores of what each user watched and searched for, and the user's item.

        watches and searches are [batch, history], features is [batch, features], item is [batch].
        """
        watched, searched = self.items(watches).mean(dim=1), self.words(searches).mean(dim=1)
        users: Tensor = self.user(watched, searched, features)
        vectors: Tensor = self.item(self.items(item))
        return users @ vectors.T / TEMPERATURE


def in_batch_loss(scores: Tensor, log_probabilities: Tensor) -> Tensor:
    """Returns the mean cross entropy of each user's own item among the items of the batch.

    Each item's scores are first reduced by its log-probability [batch] of being in a batch, since
    an item that is often in a batch would otherwise be punished too often.
    """
    corrected = scores - log_probabilities
    matches = torch.arange(len(scores), device=scores.device)
    return F.cross_entropy(corrected, matches)


def recommender_examples(
    *, batch: int, history: int, items: int, words: int, features: int
) -> Examples:
    watches, searches = (torch.randint(n, (batch, history)) for n in (items, words))
    item = torch.randint(items, (batch,))
    log_probabilities = torch.log_softmax(torch.randn(batch), dim=0)
    return (watches, searches, torch.randn(batch, features), item), (log_probabilities,)


NETWORK = Network(
    name="two_tower",
    paper="Yi et al., RecSys 2019, https://doi.org/10.1145/3298689.3346996",
    description="two-tower recommender with an in-batch softmax",
    defaults={
        "items": 1_000_000,
        "words": 1_000_000,
        "embedding": 256,
        "features": 32,
        "width": 1024,
        "vector": 128,
        "history": 50,
        "batch": 1024,
    },
    small={
        "items": 40,
        "words": 30,
        "embedding": 8,
        "features": 3,
        "width": 16,
        "vector": 4,
        "history": 5,
        "batch": 6,
    },
    modules=TwoTower,
    examples=recommender_examples,
    loss=in_batch_loss,
)
