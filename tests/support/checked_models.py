"""Models that check data. pytest rewrites the assertions of tests, so these are here."""

import torch
from torch import distributions, nn


class Wrapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4)
        self.function = function

    def forward(self, *inputs):
        return self.function(self.layer(inputs[0]), *inputs[1:])


def normal(h):
    mean, spread = h.chunk(2, -1)
    found = distributions.Normal(mean, spread.exp())
    return found.log_prob(torch.ones_like(mean)).sum() + found.entropy().sum()


def drawn_normal(h):
    mean, spread = h.chunk(2, -1)
    found = distributions.Normal(mean, spread.exp())
    drawn = found.rsample()
    return (found.log_prob(drawn.detach()) * drawn).sum()


def drawn_action(h):
    found = distributions.Categorical(logits=h)
    return found.log_prob(found.sample()).sum() + found.entropy().sum()


def drawn_bernoulli(h):
    found = distributions.Bernoulli(h.sigmoid())
    return found.log_prob(found.sample()).sum() + found.entropy().sum()


def mixture(h):
    mean, spread = h.chunk(2, -1)
    found = distributions.MixtureSameFamily(
        distributions.Categorical(torch.softmax(h[:, :2], -1)),
        distributions.Normal(mean, spread.exp()),
    )
    return found.log_prob(mean.mean(-1)).sum()


def flow(h):
    base = distributions.Independent(distributions.Normal(h * 0, h * 0 + 1), 1)
    found = distributions.TransformedDistribution(base, [distributions.SigmoidTransform()])
    return found.log_prob(h.sigmoid()).sum()


def asserted(h):
    assert torch.isfinite(h).all(), "h is not finite"
    return h.square().sum()


def asserted_without_a_text(h):
    assert bool((h * h >= 0).all())
    return h.square().sum()


def raised_by_hand(h):
    if torch.isnan(h).any() or (h > 1e6).any():
        raise ValueError(f"bad values in {tuple(h.shape)}: {h.max()}")
    return h.square().sum()


def raised_with_numbers(h):
    if not (h.abs() < 1e6).all():
        worst, where = h.max().item(), h[h.abs() >= 1e6]
        raise ValueError(f"up to {worst:.2f}, mean {h.mean():.3f}, at {where}")
    return h.square().sum()


def geometric(h):
    return distributions.Geometric(h.sigmoid()).log_prob(torch.ones_like(h)).sum()


def checked_by_torch(h):
    torch._check_tensor_all(h.isfinite(), lambda: "no infinities")
    torch._assert(h.sum() < 1e9, "small sums")
    torch._assert_async((h.detach().abs() < 1e9).all(), "small values")
    return h.square().sum()


def a_number_is_asked(h):
    if h.detach().isnan().sum():
        raise ValueError("some are not numbers")
    return h.square().sum()


def equal_to_itself(h):
    if not torch.equal(h, h + 0):
        raise ValueError("h is not equal to itself")
    return h.square().sum()


def checked_in_a_loop(h):
    for step in range(5):
        assert (h.abs() < 1e6).all(), "grown"
        h = h * 1.5 + step
    return h.square().sum()


def looped(runs, count, h):
    """Notes each run in `runs`."""
    runs.append(count)
    for _ in range(count):
        assert (h.abs() < 1e6).all()
        h = h * 1.5
    return h


def caught(h):
    try:
        assert (h < 1).all(), "large"
    except AssertionError:
        return h / 2
    return h


def wrong_elsewhere(h):
    assert (h == h).all(), "no number"
    if h.shape[-1] == 4:
        raise TypeError("four columns")
    return h


CHECKED = [
    normal,
    drawn_normal,
    drawn_action,
    drawn_bernoulli,
    mixture,
    flow,
    asserted,
    asserted_without_a_text,
    raised_by_hand,
    raised_with_numbers,
    geometric,
    checked_by_torch,
    a_number_is_asked,
    equal_to_itself,
    checked_in_a_loop,
]


def clamped(h):
    """As layers of DETR do in training."""
    if not torch.isfinite(h).all():
        limit = torch.finfo(h.dtype).max - 1000
        h = torch.clamp(h, min=-limit, max=limit)
    return h


def clamped_twice(h):
    for _ in range(2):
        if torch.isinf(h).any():
            h = h.clamp(-1e30, 1e30)
        h = h * 2
    if torch.isnan(h).any():
        h = h.nan_to_num(0.5)
    return h


def filled_and_checked(h):
    assert h.shape[0] == 2 and (h == h).any(), "no number"
    if (h > 1e9).any():
        h = torch.masked_fill(h, h > 1e9, 7.0)
    return h


LIMITED = [clamped, clamped_twice, filled_and_checked]


def clamped_with_a_memory(h):
    was_bad = False
    if torch.isinf(h).any():
        h, was_bad = h.clamp(-1e30, 1e30), True
    return h * 2 if was_bad else h


def clamped_beside_what_it_was(h):
    if torch.isinf(h).any():
        return h.clamp(-1e30, 1e30).add_(1) + h
    return h.add_(1) + h


def scaled_if_large(h):
    if (h > 1).any():
        h = h / h.max()
    return h


def clamped_and_changed(h):
    if torch.isinf(h).any():
        h = h.clamp(-1e30, 1e30) + 1
    return h


def raised_in_the_last_pass(h):
    for is_last in (False, True):
        if (h > 1).sum() > 0:
            if is_last:
                raise ValueError("still large")
            h = h / 2
    return h


NOT_LIMITED = [
    raised_in_the_last_pass,
    clamped_with_a_memory,
    clamped_beside_what_it_was,
    scaled_if_large,
    clamped_and_changed,
]
