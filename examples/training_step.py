"""Train a small GPT in a loop of one's own, whose loss and gradients a plan computes.

    python examples/training_step.py

Trains it once in plain PyTorch and once by `dt.training_step`, which is all that differs. Nothing
is compiled, so that the losses are those of plain training.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import dovetail as dt

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT = 32, 32, 4, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.attention(self.norms[0](x)).view(batch, length, 3, HEADS, -1).unbind(2)
        attended = scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in parts), is_causal=True
        )
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(*, planned: bool) -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [10])
    if planned:
        step = dt.training_step(model, loss_of, optimizer, clip=1.0, budget="1s", compile=False)
    losses = []
    draw = torch.Generator().manual_seed(1)
    for _ in range(60):
        # Each token is the one before it, plus a number that the sequence keeps.
        start, stride = torch.randint(VOCABULARY, (2, 8, 1), generator=draw)
        sequence = (start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
        inputs, targets = sequence[:, :-1], sequence[:, 1:]
        if planned:
            loss = step(inputs, targets)
        else:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    plain, ours = train(planned=False), train(planned=True)
    print("learns:", ours[-1] < 0.7 * ours[0])
    print("the same losses:", max(abs(a - b) for a, b in zip(plain, ours, strict=True)) < 1e-3)


if __name__ == "__main__":
    main()
