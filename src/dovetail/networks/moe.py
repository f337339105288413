"""A mixture-of-experts decoder: each token goes to its best few of many feed-forward networks.

    x ─► norm ─► gate ─► top k per token ─► per expert the tokens that weigh most, at most capacity
                                               │         │         │
                                           experts.0  experts.1  experts.2    each a module that
                                               │         │         │          can be placed
    x + ◄──────────────────────────────────── sum by token, weighted

Papers:

* Sizes, and weights by a softmax over the chosen experts: Jiang et al., "Mixtral of Experts", 2024,
  https://arxiv.org/abs/2401.04088, sections 2 and 2.1. The default is Mixtral 8x7B, with 47 B
  parameters.
* The capacity, which is the most tokens that an expert takes, and the balancing loss: Fedus, Zoph
  and Shazeer, "Switch Transformers", JMLR 2022, https://arxiv.org/abs/2101.03961, section 2.2.
* Tokens beyond the capacity are dropped in order of weight: Riquelme et al., "Scaling Vision with
  Sparse Mixture of Experts", NeurIPS 2021, https://arxiv.org/abs/2106.05974, section 4.1.

With a capacity every shape is known beforehand.
Differences: each expert selects its tokens by their weights (`topk`), where the papers multiply by
a one-hot dispatch tensor, so selecting costs no products; Mixtral has no capacity, which is
capacity = experts / active or more here; float32. The context of 1024 and the batch of 1 are our
choice.
"""

import math

import torch
from torch import Tensor, nn

from dovetail.networks.decoder import token_examples, token_loss
from dovetail.networks.llama import LlamaAttention, RMSNorm, RotaryDecoder, SwiGLU, check_heads
from dovetail.networks.records import Network

BALANCE = 0.01
"""The balancing loss has this weight. It is the alpha of Switch Transformers, section 2.2."""


class Expert(nn.Module):
    """A feed-forward network that some of the tokens go to."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.feed_forward = SwiGLU(hidden, inner)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted outputs [capacity, hidden] for tokens[chosen].

        tokens is [tokens, hidden], chosen and weights are [capacity].
        """
        taken = self.feed_forward(tokens.index_select(0, chosen))
        return taken * weights.unsqueeze(1)  # type: ignore[no-any-return]


class ExpertGate(nn.Module):
    """Chooses for each token the experts that it goes to, and their weights."""

    def __init__(self, hidden: int, experts: int, active: int) -> None:
        super().__init__()
        self.active = active
        self.scores = nn.Linear(hidden, experts, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (weights [tokens, experts], balancing loss) of tokens [tokens, hidden].

        A token's weights sum to 1, and are 0 for experts that it does not go to. The balancing loss
        is the number of experts times the sum over experts of (the expert's share of the tokens,
        times its mean probability).
        """
        scores = self.scores(tokens)
        best, chosen = scores.topk(self.active, dim=1)
        weights = torch.zeros_like(scores).scatter(1, chosen, torch.softmax(best, dim=1))
        shares = torch.zeros_like(scores).scatter(1, chosen, 1 / self.active).mean(dim=0)
        probabilities = torch.softmax(scores, dim=1).mean(dim=0)
        return weights, scores.shape[1] * (shares * probabilities).sum()


class MixtureOfExperts(nn.Module):
    """Maps x [batch, length, hidden] to (outputs of the same shape, balancing loss).

    capacity   an expert takes this many times the tokens that it would get if all experts got the
               same number

    Raises `ValueError` for a capacity of 0 or less.
    """

    def __init__(self, hidden: int, inner: int, experts: int, active: int, capacity: float) -> None:
        super().__init__()
        if capacity <= 0:
            raise ValueError(f"capacity is {capacity}, but an expert takes some tokens")
        self.share = capacity * active / experts
        self.gate = ExpertGate(hidden, experts, active)
        self.experts = nn.ModuleList(Expert(hidden, inner) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        weights, balance = self.gate(tokens)
        most = min(len(tokens), math.ceil(self.share * len(tokens)))
        # An expert always takes `most` tokens, so that every shape is known beforehand. If fewer
        # chose it, the others among these have weight 0 and add nothing.
        taken, chosen = weights.topk(most, dim=0)  # [most, experts]
        outputs = [
            expert(tokens, indices, weight)
            for expert, indices, weight in zip(
                self.experts, chosen.unbind(1), taken.unbind(1), strict=True
            )
        ]
        whole = torch.zeros_like(tokens).index_add(0, chosen.T.flatten(), torch.cat(outputs))
        return whole.view_as(x), balance


class MoELayer(nn.Module):
    """Attention, then a mixture of experts. Each reads its input normalised, and its output is
    added to the input."""

    def __init__(self, attention: LlamaAttention, hidden: int, mixture: MixtureOfExperts) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden)
        self.attention = attention
        self.mixture_norm = RMSNorm(hidden)
        self.mixture = mixture

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        mixed, balance = self.mixture(self.mixture_norm(x))
        return x + mixed, balance


class MoE(RotaryDecoder):
    """Maps tokens [batch, length] to (logits [batch, length, vocabulary], balancing loss).

    active   each token goes to this many of the `experts`

    Raises `ValueError` for more active experts than there are, and as `check_heads` does.
    """

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        key_heads: int,
        inner: int,
        experts: int,
        active: int,
        capacity: float,
        context: int,
        vocabulary: int,
        theta: float = 1_000_000.0,
    ) -> None:
        check_heads(hidden, heads, key_heads)
        if active > experts:
            raise ValueError(f"active is {active}, but there are {experts} experts")
        made = (
            MoELayer(
                LlamaAttention(hidden, heads, key_heads),
                hidden,
                MixtureOfExperts(hidden, inner, experts, active, capacity),
            )
            for _ in range(layers)
        )
        super().__init__(
            made, hidden=hidden, heads=heads, context=context, vocabulary=vocabulary, theta=theta,
            tied=False,
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, cosines, sines = self.begin(tokens)
        balances = []
        for layer in self.layers:
            x, balance = layer(x, cosines, sines)
            balances.append(balance)
        return self.logits(self.norm(x)), torch.stack(balances).mean()


def moe_loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Returns the mean cross entropy plus `BALANCE` times the balancing loss.

    The output is what `MoE` returns; targets is [batch, length].
    """
    logits, balance = output
    return token_loss(logits, targets) + BALANCE * balance


NETWORK = Network(
    name="moe",
    paper="Jiang et al., 2024, https://arxiv.org/abs/2401.04088",
    description="mixture-of-experts transformer decoder with a capacity per expert",
    defaults={
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "key_heads": 8,
        "inner": 14_336,
        "experts": 8,
        "active": 2,
        "capacity": 1.25,
        "context": 1024,
        "batch": 1,
        "vocabulary": 32_000,
        "theta": 1_000_000.0,
    },
    small={
        "layers": 2,
        "hidden": 16,
        "heads": 4,
        "key_heads": 2,
        "inner": 32,
        "experts": 4,
        "context": 8,
        "batch": 2,
        "vocabulary": 50,
    },
    modules=MoE,
    examples=token_examples,
    loss=moe_loss,
)
