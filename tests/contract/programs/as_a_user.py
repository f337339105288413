"""The default flow: capture, plan for `here`, run, compare with plain PyTorch, report."""

import copy

import torch
from torch import nn

import dovetail as dt

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 4),
)
plain = copy.deepcopy(model)
batches = [(torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))) for _ in range(4)]
step = dt.capture(
    model, batches[0][0], targets=batches[0][1], loss=nn.functional.cross_entropy,
    train=dt.Adam(1e-2),
)  # fmt: skip
plan = dt.plan(step, machine="here", budget="25s", compile_budget="8s")
assert plan.way in plan.measured, plan.measured
assert "eager" in plan.measured
optimizer = torch.optim.Adam(plain.parameters(), 1e-2)
with dt.run(plan, step) as placed:
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(placed.step(x, y), loss.detach(), rtol=1e-4, atol=1e-6)
    # Adam divides by the root of small squares, which magnifies what rounding leaves.
    for name, value in placed.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-2, atol=1e-3)
    measurement = placed.measure(steps=5)
assert measurement.median_seconds > 0
plan.save("here.json")
dt.report(plan, step, "here.html", measurement=measurement)
print("done")
