"""Imitation of good placements: where a policy begins before it learns from its own trials.

    cuts by each position ┐
    baselines, families   ├─► the best ─► local search ─► target [groups]
                                                             │
    view ─► policy ─► log pi [groups, devices] ──► L = -mean over groups of log pi(target)

Behaviour cloning (D. Pomerleau, "Efficient Training of Artificial Neural Networks for Autonomous
Navigation", Neural Computation 3(1), 1991, https://doi.org/10.1162/neco.1991.3.1.88). Devices that
are alike can change places in a target without a change of its value, so of all such targets the
one that the policy finds likeliest counts: an assignment problem a class of like devices (H. W.
Kuhn, "The Hungarian method for the assignment problem", 1955,
https://doi.org/10.1002/nav.3800020109). GDP itself begins at random; a policy that decides each
group by itself needs very many trials from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dovetail.placers.baselines import attempt, try_baselines
from dovetail.placers.budget import Budget, Score
from dovetail.placers.families import families
from dovetail.placers.learned.features import column, cut_placements
from dovetail.placers.learned.gdp import Gdp
from dovetail.placers.learned.records import Int64, View
from dovetail.placers.local_search import local_search
from dovetail.placers.multilevel import multilevel
from dovetail.placers.problem import GroupPlacement, Problem

INDEPENDENT = 30.0
"""Groups that a graph's many count for when a mode is to be told from another."""


@dataclass(frozen=True, eq=False)
class Example:
    """A view, a good placement of it [groups], and which devices are alike [devices], as
    `likeness_of` says."""

    view: View
    target: GroupPlacement
    likeness: Int64


def good_placement(problem: Problem, view: View, evaluations: int) -> tuple[Score, GroupPlacement]:
    """The best that cuts, baselines and local search find within so many evaluations."""
    budget = Budget(evaluations=evaluations, threads=1)
    try_baselines(problem, budget)
    budget.score(problem, np.unique(cut_placements(view), axis=0), always=True)
    for method, share in ((families, 0.5), (multilevel, 0.6), (local_search, 1.0)):
        whole = evaluations if method is families else budget.left
        part = budget.slice(evaluations=int(share * whole))
        attempt(method.__name__, method, problem, part)
    assert budget.best is not None, "the baselines were evaluated"
    return budget.best[0], budget.best[1]


def likeness_of(problem: Problem) -> Int64:
    """[devices] the first device that is of the same kind, model, memory and rates."""
    devices = problem.machine.devices
    facts = [
        (d.kind, d.model, int(m), tuple(sorted(d.flops_per_second.items())))
        for d, m in zip(devices, problem.capacities, strict=True)
    ]
    return np.array([facts.index(fact) for fact in facts], dtype=np.int64)


def clone(
    policy: Gdp,
    examples: Sequence[Example],
    *,
    passes: int,
    rate: float = 1e-3,
    batch: int = 4,
    seed: int = 0,
    progress: Callable[[int, float], bool] | None = None,
) -> list[float]:
    """Train the policy to take the examples' targets; the mean loss of each pass, in nats.

    rate       Adam's at the start, linear to a tenth at the end
    progress   called with (pass, loss) after each; False ends it

    Every pass sees every example once, in an order drawn from (seed, pass).
    """
    optimizer = torch.optim.Adam(policy.parameters(), lr=rate)
    losses: list[float] = []
    for number in range(passes):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - 0.9 * number / max(1, passes - 1))
        order = np.random.default_rng((seed, number)).permutation(len(examples))
        found = []
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch].tolist()
            optimizer.zero_grad()
            for index in chosen:
                loss = imitation_loss(policy, examples[index])
                (loss / len(chosen)).backward()  # type: ignore[no-untyped-call]
                found.append(float(loss.detach()))
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        losses.append(float(np.mean(found)))
        if progress is not None and not progress(number, losses[-1]):
            break
    return losses


def imitation_loss(policy: Gdp, example: Example) -> Tensor:
    """-log pi of the likeliest equal of the target, a mean over groups with a choice: half of it by
    their number, half by their work. Of a policy with modes: of the mixture, as if a graph had
    `INDEPENDENT` groups that decide for themselves."""
    view = example.view
    free = torch.from_numpy(np.flatnonzero(view.free))
    modes, logits = policy.logits(view)
    targets = torch.from_numpy(example.target.astype(np.int64))[free]
    work = torch.from_numpy(view.numbers[view.free, column("work_share")])
    weights = 0.5 / len(free) + 0.5 * work / work.sum().clamp(min=1e-9)
    losses = []
    for of_mode in torch.log_softmax(logits, dim=2):
        logs = of_mode[free].clamp(min=-20.0)  # what is not allowed is never a target
        with torch.no_grad():
            renamed = _likeliest_names(logs, targets, weights, example.likeness)
        taken = logs.gather(1, renamed[targets][:, None]).squeeze(1)
        losses.append(-(weights * taken).sum())
    mixed = torch.log_softmax(modes, 0) - INDEPENDENT * torch.stack(losses)
    return -torch.logsumexp(mixed, 0) / INDEPENDENT


def _likeliest_names(logs: Tensor, targets: Tensor, weights: Tensor, likeness: Int64) -> Tensor:
    """[devices] the device that each one of the target stands for: of its like, such that the
    policy's weighted log-probability is highest."""
    devices = logs.shape[1]
    gains = torch.zeros(devices, devices).index_add_(0, targets, weights[:, None] * logs)
    costs = np.where(likeness[:, None] == likeness, -gains.numpy(), 1e9)
    return torch.from_numpy(linear_sum_assignment(costs)[1].astype(np.int64))
