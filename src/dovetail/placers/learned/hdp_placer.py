"""HDP's placer: from embeddings of groups to a device for each, by LSTMs with attention.

The network of TensorFlow's python/grappler/hierarchical_controller.py, by HDP's authors; attention
after D. Bahdanau, K. Cho and Y. Bengio, "Neural Machine Translation by Jointly Learning to Align
and Translate", ICLR 2015, https://arxiv.org/abs/1409.0473.

    m_1 … m_G   W1 · the states of a bidirectional LSTM over the embeddings   [groups, hidden]
    s_t         the decoder's state, from s_{t-1} and the embedding of d_{t-1}, nothing else
    c_t         Σ softmax(v tanh(W2 s_t + m))_j m_j
    d_t         ~ softmax(C tanh(W [s_t, c_t] / T) + noise)                   where it is allowed

noise: normal, of `noise` times the root mean square of a step's logits; while it lasts it is part
of the policy, and the trial's own numbers come with its actions.

Differences: LSTMs with a bias per unit, that of the forget gate starting at 1, instead of one
shared bias there; devices that are forbidden are left out.
"""

from typing import Any

import torch
from torch import Tensor, nn

FORBIDDEN = -1e9
"""A logit whose probability is 0, and which times 0 is 0."""
PIECE = 2**20
"""Numbers of attention that are worked on at once: they should stay in the cache."""


class HdpPlacer(nn.Module):
    """Embeddings [batch, steps, size], `allowed` [batch, steps, devices] -> a device a step.

    bound, temperature   C and T
    """

    def __init__(
        self, size: int, devices: int, *, hidden: int, bound: float, temperature: float
    ) -> None:
        super().__init__()
        self.bound, self.temperature = bound, temperature
        self.encoder = nn.LSTM(size, hidden // 2, batch_first=True, bidirectional=True)
        self.memory = nn.Linear(hidden, hidden, bias=False)
        self.device_embeddings = nn.Embedding(devices + 1, hidden)  # the last: before the first
        self.decoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Parameter(torch.empty(hidden, 1))
        self.out = nn.Linear(2 * hidden, devices, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.zeros_(parameter)
                if "bias_ih" in name:
                    nn.init.ones_(parameter[len(parameter) // 4 : len(parameter) // 2])

    @property
    def devices(self) -> int:
        return self.out.out_features

    def judge(
        self, embeddings: Tensor, allowed: Tensor, actions: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) [batch, steps] of `actions`, with gradient.

        noise   [batch, steps, devices] standard normal times its share; None: none
        """
        before = torch.full_like(actions, self.devices)
        before[:, 1:] = actions[:, :-1]
        memory, state = self._encode(embeddings)
        states, _ = self.decoder(self.device_embeddings(before), state)
        context = _attend(self.query(states), memory, self.score)
        logits = self._logits(torch.cat([states, context], dim=2), noise)
        logs = logits.masked_fill(~allowed, FORBIDDEN).log_softmax(dim=2)
        entropies = -(logs.exp() * logs).sum(dim=2)
        return logs.gather(2, actions[..., None])[..., 0], entropies

    @torch.no_grad()
    def decode(
        self, embeddings: Tensor, allowed: Tensor, chance: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(actions, their log-probabilities) [batch, steps]: of each step the device of the
        largest logit + chance.

        chance   [batch, steps, devices] Gumbel numbers draw from the policy, zeros take the
                 likeliest
        """
        batch, steps, _ = chance.shape
        memory, (hidden, cell) = self._encode(embeddings)
        into, from_hidden, *biases = self.decoder.parameters()
        of_device = nn.functional.linear(self.device_embeddings.weight, into, biases[0] + biases[1])
        again = from_hidden.T.contiguous()
        forbidden = torch.zeros_like(chance).masked_fill_(~allowed, FORBIDDEN)
        hidden, cell = hidden[0], cell[0]
        last = torch.full((batch,), self.devices)
        actions = torch.empty((batch, steps), dtype=torch.long)
        log_probs = torch.empty((batch, steps), dtype=memory.dtype)
        for step in range(steps):
            gates = torch.addmm(of_device[last], hidden, again)
            enter, forget, new, leave = gates.chunk(4, dim=1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            context = _attend(self.query(hidden)[:, None], memory, self.score)[:, 0]
            logits = self._logits(
                torch.cat([hidden, context], dim=1), None if noise is None else noise[:, step]
            )
            logs = (logits + forbidden[:, step]).log_softmax(dim=1)
            last = (logs + chance[:, step]).argmax(dim=1)
            actions[:, step] = last
            log_probs[:, step] = logs.gather(1, last[:, None])[:, 0]
        return actions, log_probs

    def _encode(self, embeddings: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(memory [batch, steps, hidden], the decoder's first state [1, batch, hidden] twice)."""
        states, last = self.encoder(embeddings)
        hidden, cell = (torch.cat([s[0], s[1]], dim=1)[None] for s in last)
        return self.memory(states), (hidden, cell)

    def _logits(self, states: Tensor, noise: Tensor | None) -> Tensor:
        logits: Tensor = self.out(states) / self.temperature
        if self.bound > 0:
            logits = self.bound * logits.tanh()
        return logits if noise is None else noisy(logits, noise)


def noisy(logits: Tensor, noise: Tensor) -> Tensor:
    """Logits [..., choices] plus noise times the root mean square of each row."""
    return logits + noise * logits.square().mean(dim=-1, keepdim=True).sqrt()


def _attend(queries: Tensor, memory: Tensor, score: Tensor) -> Tensor:
    """[batch, steps, hidden] what queries [batch, steps, hidden] find in memory
    [batch, groups, hidden]."""
    scores: Tensor = _Scores.apply(queries, memory, score)  # type: ignore[no-untyped-call]
    return torch.bmm(scores.softmax(dim=2), memory)


class _Scores(torch.autograd.Function):
    """v tanh(query + memory): [batch, steps, groups].

    What is between has batch x steps x groups x hidden numbers: it is made piece by piece and made
    again for the gradient, which is faster than to keep it.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, memory: Tensor, score: Tensor) -> Tensor:
        ctx.save_for_backward(queries, memory, score)
        pieces = [(_tanh(piece, memory) @ score)[..., 0] for piece in _pieces(queries, memory)]
        return torch.cat(pieces, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With t the tanh and g what arrives: v Σ g (1 - t^2) over groups, over steps; Σ g t."""
        queries, memory, score = ctx.saved_tensors
        of_query = []
        of_memory, of_score = torch.zeros_like(memory), torch.zeros_like(score)
        start = 0
        for piece in _pieces(queries, memory):
            given = gradients[0][:, start : start + piece.shape[1]]
            start += piece.shape[1]
            through = _tanh(piece, memory)
            of_score += (given.reshape(1, -1) @ through.view(-1, len(score))).T
            through.square_().neg_().add_(1)
            of_query.append((given[:, :, None] @ through)[:, :, 0])
            of_memory += through.mul_(given[..., None]).sum(dim=1)
        return torch.cat(of_query, dim=1) * score[:, 0], of_memory * score[:, 0], of_score


def _pieces(queries: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
    size = max(1, PIECE // memory.numel())
    return queries.tensor_split(list(range(size, queries.shape[1], size)), dim=1)


def _tanh(queries: Tensor, memory: Tensor) -> Tensor:
    """[batch, steps, groups, hidden]"""
    return (queries[:, :, None] + memory[:, None]).tanh_()
