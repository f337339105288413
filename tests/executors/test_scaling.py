"""Gradient scaling and autocast as part of a training step."""

import copy

import pytest
import torch
from torch import nn

from dovetail.errors import ModelError, UsageError
from dovetail.executors import run
from dovetail.frontends import SGD, Adam, GradScaler, capture, initial_values, run_step
from dovetail.transforms import towers
from tests.support.placing import plan_for


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))


def batches(count=5):
    """The third overflows, so that its gradients are not finite."""
    torch.manual_seed(1)
    data = [(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(count)]
    data[2] = (data[2][0], torch.full((4, 3), 1e38))
    return data


def squared(output, target):
    return (output.float() - target).square().mean()


SETTINGS = {"init_scale": 1024.0, "growth_interval": 2}


def plain_steps(module, optimizer, data):
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    losses, scales = [], []
    for x, y in data:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = squared(module(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        scales.append(scaler.get_scale())
    return losses, scales


@pytest.mark.parametrize(
    ("train", "optimizer"),
    [(SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False)),
     (Adam(0.01), lambda p: torch.optim.Adam(p, 0.01, foreach=False))],
)  # fmt: skip
def test_a_scaled_step_under_autocast_equals_torch_also_where_a_step_is_skipped(train, optimizer):
    module, data = network(), batches()
    plain = copy.deepcopy(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = capture(
            module, data[0][0], targets=data[0][1], loss=squared, train=train,
            scaler=GradScaler(**SETTINGS),
        )  # fmt: skip
    losses, scales = plain_steps(plain, optimizer(plain.parameters()), data)
    assert scales[2] == scales[1] / 2  # the overflow was one
    values = initial_values(captured)
    of_name = {
        source.name: captured.graph.outputs_of(op)[0]
        for op, source in enumerate(captured.program.sources)
        if source is not None
    }
    for step, (x, y) in enumerate(data):
        found = run_step(captured, values, (x,), (y,), step=step)
        assert torch.equal(found, losses[step])
        assert float(values[of_name["scaler/scale"]]) == scales[step]
    for name, parameter in plain.named_parameters():
        assert torch.equal(values[of_name[name]], parameter)


def test_a_scaled_step_runs_on_two_devices(workers, one_thread):
    module, data = network(), batches()
    captured = capture(
        module, data[0][0], targets=data[0][1], loss=squared, train=SGD(0.1), scaler=GradScaler()
    )
    values = initial_values(captured)
    expected = [run_step(captured, values, (x,), (y,), step=i) for i, (x, y) in enumerate(data)]
    placement = [op % 2 for op in range(len(captured.graph))]
    for ids in range(captured.graph.colocation.max() + 1):
        together = [op for op, own in enumerate(captured.graph.colocation) if own == ids]
        for op in together:
            placement[op] = placement[together[0]]
    with run(plan_for(captured, placement), captured, workers=workers) as placed:
        assert all(
            torch.equal(placed.step(x, y), loss)
            for (x, y), loss in zip(data, expected, strict=True)
        )
        assert float(placed.optimizer_state_dict()["scaler/scale"]) == 65536.0 / 2


def test_what_a_scaler_cannot_do_is_an_error():
    x, y = batches()[0]
    with pytest.raises(ModelError, match="scaler is for training"):
        capture(network(), x, scaler=GradScaler())
    with pytest.raises(ModelError, match=r"0.weight is float16"):
        capture(network().half(), x.half(), targets=y, loss=squared, train=SGD(),
                scaler=GradScaler())  # fmt: skip
    with pytest.raises(ModelError, match=r"0.weight is complex64"):
        capture(network().to(torch.complex64), x, targets=y, loss=squared, train=SGD(),
                scaler=GradScaler())  # fmt: skip
    with pytest.raises(UsageError, match="growth_factor"):
        GradScaler(growth_factor=0.5)
    scaled = capture(network(), x, targets=y, loss=squared, train=SGD(), scaler=GradScaler())
    with pytest.raises(UsageError, match="gradient scaler"):
        towers(scaled, 2)
