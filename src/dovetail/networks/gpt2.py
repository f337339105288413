"""GPT-2: a transformer decoder, normalised before attention and feed-forward.

    tokens ─► embedding + positions ─► layers.0 ─► ... ─► layers.N ─► norm ─► logits
                                          x + attention(norm(x)), x + mlp(norm(x))

Paper: Radford, Wu, Child, Luan, Amodei and Sutskever, "Language Models are Unsupervised Multitask
Learners", 2019, https://openai.com/research/better-language-models, section 2.3. The defaults are
GPT-2 small: 12 layers of 768, a context of 1024 and 50,257 tokens. The logits use the embedding's
weight. That makes 124,439,808 parameters, as in the published weights; the paper's table says
117 M. The other sizes are

    medium   layers=24, hidden=1024, heads=16
    large    layers=36, hidden=1280, heads=20
    XL       layers=48, hidden=1600, heads=25

Differences: no dropout; the batch of 8 is our choice.
"""

from torch import Tensor, nn

from dovetail.networks.decoder import causal_attention, split_heads, token_examples, token_loss
from dovetail.networks.records import Network


class GPT2Attention(nn.Module):
    """Causal self-attention that computes query, key and value in one product."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(x).chunk(3, dim=2)
        query, key, value = (split_heads(part, self.heads) for part in parts)
        attended: Tensor = self.output(causal_attention(query, key, value))
        return attended


class GPT2Layer(nn.Module):
    """Attention, then a feed-forward network of 4 x hidden. Each reads its input normalised, and
    its output is added to the input."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = GPT2Attention(hidden, heads)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT2(nn.Module):
    """Maps tokens [batch, length] to logits [batch, length, vocabulary], for length <= context.

    Raises `ValueError` unless `hidden` is a multiple of `heads`.
    """

    def __init__(
        self, *, layers: int, hidden: int, heads: int, context: int, vocabulary: int
    ) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"hidden is {hidden}, but must be a multiple of {heads} heads")
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(context, hidden)
        self.layers = nn.ModuleList(GPT2Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.logits = nn.Linear(hidden, vocabulary, bias=False)
        self.logits.weight = self.embedding.weight
        # Each layer adds to the residual stream twice. As in the paper, the weights of these two
        # products are smaller by the square root of their number, which keeps the sum's variance.
        for name, parameter in self.named_parameters():
            last = name.endswith(("attention.output.weight", "mlp.2.weight"))
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 * ((2 * layers) ** -0.5 if last else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.norm(x))  # type: ignore[no-any-return]


NETWORK = Network(
    name="gpt2",
    paper="Radford et al., 2019, https://openai.com/research/better-language-models",
    description="GPT-2 style transformer decoder",
    defaults={
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "context": 1024,
        "batch": 8,
        "vocabulary": 50_257,
    },
    small={"layers": 2, "hidden": 16, "heads": 2, "context": 8, "batch": 2, "vocabulary": 50},
    modules=GPT2,
    examples=token_examples,
    loss=token_loss,
)
