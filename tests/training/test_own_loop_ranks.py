"""`dt.Optimizer` in a program of several ranks."""

import textwrap

import numpy as np
import pytest

from tests.support.own_loops import Ranks, program

RULES = ["adag-agn", "downpour", "aeasgd", "eamsgd", "easgd", "diloco", "hogwild", "one-shot"]


def run(body, ranks=2):
    with Ranks(ranks, program(textwrap.dedent(body))) as started:
        return started.results()


@pytest.fixture(scope="module")
def trained():
    """What two ranks get by sync, by DDP, and by each other rule."""
    return run(f"""
        sgd = lambda network: torch.optim.SGD(groups(network), lr=0.1, momentum=0.9)
        torch.distributed.init_process_group("gloo")
        results = {{
            "ddp": with_ddp(rank), "sync": with_rule(rank, "sync"),
            "ddp sgd": with_ddp(rank, sgd), "sync sgd": with_rule(rank, "sync", sgd),
            "uneven": with_rule(rank, "sync", steps=4 + 2 * rank),
        }}
        for rule in {RULES}:
            results[rule] = with_rule(rank, rule, window=None if rule == "one-shot" else 2)
        torch.distributed.destroy_process_group()
        print(json.dumps(results))
    """)


@pytest.mark.parametrize("kind", ["", " sgd"])
def test_sync_gives_the_numbers_of_ddp(trained, kind):
    for result in trained:
        np.testing.assert_allclose(result["sync" + kind], result["ddp" + kind], rtol=1e-6)


@pytest.mark.parametrize("rule", [*RULES, "sync", "uneven"])
def test_all_ranks_end_with_the_center(trained, rule):
    first, second = (result[rule] for result in trained)
    assert first == second
    assert np.isfinite(first).all()
