import torch

from dovetail.frontends import Call, Ref
from dovetail.frontends.interpret import bind


def bound(call, *tensors, frees=(), seed=0):
    """(function, table of values) with two free places behind the tensors."""
    values = [*tensors, None, None]
    return bind(call, values, frees, lambda: seed), values


def test_constants_and_tensors_take_their_places():
    run, values = bound(Call(torch.sub, (10, Ref(0)), {"alpha": 3}, (1,)), torch.tensor(2))
    run()
    assert values[1] == 4
    values[0] = torch.tensor(3)
    run()
    assert values[1] == 1


def test_operators_are_called():
    call = Call(torch.ops.aten.add.Tensor, (Ref(0), Ref(0)), {}, (1,))
    run, values = bound(call, torch.tensor(2))
    run()
    assert values[1] == 4


def test_tensors_in_lists_and_keywords_are_found():
    call = Call(torch.cat, ([Ref(0), Ref(1)],), {"dim": 0}, (2,))
    run, values = bound(call, torch.tensor([1]), torch.tensor([2]))
    run()
    assert values[2].tolist() == [1, 2]
    call = Call(torch.clamp, (Ref(0),), {"min": Ref(1), "max": None}, (2,))
    run, values = bound(call, torch.tensor(1), torch.tensor(5))
    run()
    assert values[2] == 5


def test_of_several_results_the_unwanted_are_dropped():
    run, values = bound(Call(torch.max, (Ref(0), 0), {}, (-1, 1)), torch.tensor([3, 9]))
    run()
    assert values[1] == 1
    assert values[2] is None


def test_a_list_of_one_result_is_that_result():
    run, values = bound(Call(torch.split, (Ref(0), 2), {}, (1,)), torch.tensor([3, 9]))
    run()
    assert values[1].tolist() == [3, 9]


def test_what_is_done_with_is_forgotten():
    for results in ((1,), (-1,)):
        run, values = bound(Call(torch.neg, (Ref(0),), {}, results), torch.tensor(2), frees=(0,))
        run()
        assert values[0] is None


def test_a_random_call_draws_by_its_seed_alone():
    call = Call(torch.rand_like, (Ref(0),), {}, (1,), random=True)
    run, values = bound(call, torch.zeros(4), seed=5)
    run()
    first = values[1]
    torch.rand(3)
    run()
    assert torch.equal(values[1], first)
    run, values = bound(call, torch.zeros(4), seed=6)
    run()
    assert not torch.equal(values[1], first)
