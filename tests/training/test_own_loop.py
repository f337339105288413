"""`dt.Optimizer` in a loop of the caller's, in one process."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.errors import DivergedError, ModelError, UnknownRuleError, UsageError
from tests.support.own_loops import a_network, adamw, batches, groups, train, values


def sgd(network):
    return torch.optim.SGD(groups(network), lr=0.1, momentum=0.9)


REDUCES = ["adag-agn", "adag", "agn", "downpour", "dynsgd", "ssp", "averaging", "hogwild", "sync"]


@pytest.mark.parametrize("rule", REDUCES)
@pytest.mark.parametrize("make", [sgd, adamw])
def test_one_rank_with_window_1_does_what_its_optimizer_does_alone(rule, make):
    results = []
    for wraps in (False, True):
        network = a_network()
        inner = make(network)
        optimizer = dt.Optimizer(inner, rule, 1) if wraps else inner
        train(network, optimizer, batches(0), torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        if wraps:
            optimizer.finish()
        results.append(values(network))
    np.testing.assert_allclose(*results, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("rule", "window"),
    [("adag-agn", 3), ("aeasgd", 2), ("eamsgd", 3), ("easgd", 4), ("diloco", 6), ("dynsgd", 2)],
)
def test_one_rank_gets_the_center_that_trainer_gets(rule, window):
    inputs, targets = torch.randn(48, 6), torch.randn(48, 3)
    module = a_network()
    dt.Trainer(
        module, nn.functional.mse_loss, partial(torch.optim.Adam, lr=0.01), rule, 1, "simulated",
        batch=4, window=window,
    ).fit((inputs, targets))  # fmt: skip

    network = a_network()
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = dt.Optimizer(torch.optim.Adam(trained, lr=0.01), rule, window)
    order = np.random.default_rng((0, 0)).permutation(48)
    for indices in torch.from_numpy(order).split(4):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(inputs[indices]), targets[indices]).backward()
        optimizer.step()
    optimizer.finish()
    assert values(network) == values(module)


def test_plain_sgd_by_the_server_is_a_step_of_the_mean_gradient_of_a_window():
    network, alone = a_network(), a_network()
    optimizer = dt.Optimizer(torch.optim.SGD(network.parameters(), lr=0.1), "dc-asgd", 2)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    train(network, optimizer, batches(0, 6))
    for first, second in zip(batches(0, 6)[::2], batches(0, 6)[1::2], strict=True):
        plain.zero_grad()
        ((alone(first).square().mean() + alone(second).square().mean()) / 2).backward()
        plain.step()
    np.testing.assert_allclose(values(network), values(alone), rtol=1e-5, atol=1e-7)


def test_the_same_loop_gives_the_same_bits():
    def run():
        network = a_network()
        with dt.Optimizer(adamw(network), "async-diloco", 2) as optimizer:
            train(network, optimizer, batches(0))
        return values(network)

    assert run() == run()


def test_a_window_that_is_not_full_is_committed_at_the_end():
    network, alone = a_network(), a_network()
    optimizer, plain = dt.Optimizer(sgd(network), "downpour", None), sgd(alone)
    train(network, optimizer, batches(0))
    train(alone, plain, batches(0))
    before = values(network)
    assert optimizer.center_state_dict(network)["0.bias"].equal(a_network()[0].bias)
    optimizer.finish()
    np.testing.assert_allclose(values(network), values(alone), rtol=1e-6)
    np.testing.assert_allclose(values(network), before, rtol=1e-6)


def test_the_center_can_be_evaluated_within_a_window_without_a_trace():
    def run(looks):
        network = a_network()
        optimizer = dt.Optimizer(adamw(network), "aeasgd", 3)
        for number, inputs in enumerate(batches(0)):
            train(network, optimizer, [inputs])
            if looks and number == 3:
                own = values(network)
                with optimizer.at_center():
                    center = values(network)
                assert values(network) == own != center
                state = optimizer.center_state_dict(network)
                assert state["0.weight"].equal(state["2.weight"])
                named = [state[name].flatten() for name, _ in network.named_parameters()]
                assert torch.cat(named).tolist() == center
                assert network[0].weight is network[2].weight
        optimizer.finish()
        return values(network)

    assert run(True) == run(False)


def test_weights_may_be_loaded_until_the_first_step():
    network, loaded = a_network(), a_network(5)
    optimizer = dt.Optimizer(adamw(network), "agn", 1)
    network.load_state_dict(loaded.state_dict())
    alone = adamw(loaded)
    train(network, optimizer, batches(0))
    train(loaded, alone, batches(0))
    np.testing.assert_allclose(values(network), values(loaded), rtol=1e-6, atol=1e-8)


def test_its_state_is_the_wrapped_optimizers_and_can_be_loaded():
    network = a_network()
    inner = adamw(network)
    optimizer = dt.Optimizer(inner, "agn", 2)
    train(network, optimizer, batches(0, 4))
    state = optimizer.state_dict()
    assert optimizer.state is inner.state
    assert len(state["state"]) == 4
    again = dt.Optimizer(adamw(network), "agn", 2)
    again.load_state_dict(state)
    assert [group["lr"] for group in again.param_groups] == [0.01, 0.03]
    again.param_groups[0]["lr"] = 0.0
    before = network[0].bias.detach().clone(), network[0].weight.detach().clone()
    train(network, again, batches(0, 1))
    assert not network[0].bias.equal(before[0])
    assert network[0].weight.equal(before[1])


def test_a_closure_is_called_with_gradients_and_its_value_returned():
    network = a_network()
    optimizer = dt.Optimizer(adamw(network), "agn")

    def closure():
        optimizer.zero_grad()
        loss = network(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [float(optimizer.step(closure)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_a_grad_scaler_skips_steps_whose_gradients_are_not_finite():
    network, alone = a_network(), a_network()
    results = []
    for net, wraps in ((network, True), (alone, False)):
        optimizer = dt.Optimizer(sgd(net), "agn", 1) if wraps else sgd(net)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number, inputs in enumerate(batches(0)):
            optimizer.zero_grad()
            loss = net(inputs).square().mean() * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((values(net), scaler.get_scale()))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    assert results[0][1] == results[1][1] == 2.0


@pytest.mark.parametrize("rule", ["agn", "aeasgd"])
def test_a_commit_that_is_not_finite_is_dropped_with_its_window(rule):
    network = a_network()
    optimizer = dt.Optimizer(sgd(network), rule, 1)
    train(network, optimizer, batches(0, 2))
    train(network, optimizer, [torch.full((4, 6), float("nan"))])
    for group in optimizer.param_groups:  # its momentum is the caller's, who may reset it
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    train(network, optimizer, batches(0, 2))
    optimizer.finish()
    assert np.isfinite(values(network)).all()


def test_a_training_without_end_of_refused_commits_is_ended():
    network = a_network()
    optimizer = dt.Optimizer(sgd(network), "downpour", 1)
    with pytest.raises(DivergedError, match="101 commits were refused, the last one as not finite"):
        train(network, optimizer, [torch.full((4, 6), float("nan"))] * 101)
    with pytest.raises(UsageError, match="the training has ended"):
        optimizer.step()


def test_batch_norms_statistics_are_computed_at_the_end():
    network = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    optimizer = dt.Optimizer(torch.optim.SGD(network.parameters(), lr=0.1), "agn", 2)
    train(network, optimizer, batches(0))
    own = network[1].running_mean.clone()
    optimizer.finish()
    assert network[1].running_mean.equal(own)
    optimizer.finish(network, batches(0))
    expected = torch.stack([network[0](inputs).mean(0) for inputs in batches(0)]).mean(0)
    torch.testing.assert_close(network[1].running_mean, expected.detach())


def test_an_error_in_the_block_ends_it_without_a_last_commit():
    network = a_network()
    with pytest.raises(ZeroDivisionError), dt.Optimizer(adamw(network), "agn") as optimizer:
        train(network, optimizer, batches(0, 2))
        raise ZeroDivisionError
    with pytest.raises(UsageError, match="step: the training has ended"):
        optimizer.step()


def test_what_was_frozen_at_the_beginning_must_stay_frozen():
    network = a_network()
    optimizer = dt.Optimizer(adamw(network), "agn")
    train(network, optimizer, batches(0, 1))
    network[2].bias.requires_grad_(True)
    with pytest.raises(UsageError, match="needed none when the optimizer was made"):
        optimizer.step()


def of(*parameters, **settings):
    return torch.optim.SGD(parameters, lr=0.1, **settings)


def test_what_cannot_be_wrapped_is_refused_in_one_line():
    weight, wide = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())
    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match=r"give a torch\.optim\.Optimizer, not str"):
        dt.Optimizer("adam")
    with pytest.raises(UsageError, match="is wrapped already"):
        dt.Optimizer(dt.Optimizer(of(weight)))
    with pytest.raises(UsageError, match="LBFGS evaluates the loss several times a step"):
        dt.Optimizer(torch.optim.LBFGS([weight]))
    with pytest.raises(UnknownRuleError):
        dt.Optimizer(of(weight), "adagg")
    with pytest.raises(UsageError, match="window: must be a whole number"):
        dt.Optimizer(of(weight), window="long")
    with pytest.raises(UsageError, match="window"):
        dt.Optimizer(of(weight), window=0)
    with pytest.raises(UsageError, match="give one address of this machine"):
        dt.Optimizer(of(weight), listen="0.0.0.0")
    with pytest.raises(UsageError, match="sync takes no options here"):
        dt.Optimizer(of(weight), dt.make_rule("sync", optimizer="adam"))
    with pytest.raises(UsageError, match="the server of dc-asgd steps by -lr g"):
        dt.Optimizer(of(weight, momentum=0.9), "dc-asgd")
    with pytest.raises(ModelError, match=r"parameter 0 of group 0: is torch\.bfloat16"):
        dt.Optimizer(of(half))
    with pytest.raises(ModelError, match="mixes float32 and float64"):
        dt.Optimizer(of(weight, wide))
    with pytest.raises(ModelError, match="has no parameter that requires a gradient"):
        dt.Optimizer(of(nn.Parameter(torch.ones(2), requires_grad=False)))
    with pytest.raises(UsageError, match="all ranks have agreed on the parameters"):
        dt.Optimizer(of(weight)).add_param_group({"params": [wide]})


def test_the_server_steps_by_one_rate_only():
    network = a_network()
    optimizer = dt.Optimizer(
        torch.optim.SGD(
            [{"params": network[0].parameters()}, {"params": network[3].parameters(), "lr": 0.2}],
            lr=0.1,
        ),
        "dc-asgd",
    )
    with pytest.raises(UsageError, match="steps by one learning rate for all groups"):
        train(network, optimizer, batches(0, 1))


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "WORLD_SIZE: is 2, but RANK is not set; start the ranks by torchrun",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "1"},
            "is 2, but MASTER_ADDR, MASTER_PORT is not set; start the ranks by torchrun",
        ),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: must be a whole number, not 'two'"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_in_one_line(variables, line, monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as error:
        dt.Optimizer(of(nn.Parameter(torch.ones(2))))
    assert line in str(error.value)
