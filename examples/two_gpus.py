"""Plan a training step for a machine that is not here: two P100s and a CPU, by analytic costs.

The same seed and a budget in evaluations give the same plan everywhere.
"""

import torch
from torch import nn

import dovetail as dt


class TwoTowers(nn.Module):
    """Two towers of linear layers whose outputs are compared."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.users = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
        self.items = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.users(user) * self.items(item)).sum(dim=1)


def main() -> None:
    inputs = torch.randn(4096, 1024), torch.randn(4096, 1024)
    targets = (torch.randn(4096),)
    step = dt.capture(
        TwoTowers(), *inputs, targets=targets, loss=nn.functional.mse_loss, train=dt.Adam(1e-3)
    )
    plan = dt.plan(step, "2 x p100 + haswell", placer="local_search", budget="2000e", seed=0)
    print(plan)
    towers = {name: set() for name in ("users", "items")}
    for op, module in enumerate(step.graph.modules):
        tower = module.split(".")[0]
        if tower in towers and not step.graph.is_source[op]:
            towers[tower].add(plan.machine.device_names[plan.placement[op]])
    for tower, devices in towers.items():
        print(tower, "on", ", ".join(sorted(devices)))


if __name__ == "__main__":
    main()
