"""Real training, small: losses fall, and towers are the arithmetic that they stand for."""

import sys
from dataclasses import replace

import pytest
import torch

from dovetail.errors import MissingLibraryError
from dovetail.networks import NETWORKS
from reproductions import towers
from reproductions.records import ASYNCHRONOUS, SYNCHRONOUS
from reproductions.towers import ONE_BATCH, TASKS, curves, losses_of

IMAGES, WORDS = TASKS


def few(task, steps, /, **options):
    return replace(task, steps=steps, options=task.options | options)


WORDS_TINY = few(WORDS, 6, hidden=12, steps=4, batch=3, vocabulary=7)


def test_the_loss_falls_on_words_written_backwards():
    losses = losses_of(few(WORDS, 30, hidden=24, steps=3, batch=4, vocabulary=5), ONE_BATCH, 0)
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def repeated(options, count, generator):
    """The same four parts at every step."""
    return IMAGES.data(options, 4, generator) * (count // 4)


@pytest.mark.parametrize("way", IMAGES.ways)
def test_inception_learns_a_few_digits_in_every_way(way):
    losses = losses_of(replace(few(IMAGES, 12, batch=4, width=0.0625), data=repeated), way, 0)
    # Batch norm over four images amplifies what one processor rounds unlike another: a single
    # step's loss is not alike everywhere, the mean of three is.
    assert sum(losses[-3:]) / 3 < losses[0] - 0.2


def test_all_ways_begin_alike_and_the_same_seed_gives_the_same_losses():
    synchronous = losses_of(WORDS_TINY, SYNCHRONOUS, 3)
    assert losses_of(WORDS_TINY, SYNCHRONOUS, 3) == synchronous
    asynchronous = losses_of(WORDS_TINY, ASYNCHRONOUS, 3)
    assert losses_of(WORDS_TINY, ASYNCHRONOUS, 3) == asynchronous
    assert asynchronous[0] == pytest.approx(synchronous[0], rel=1e-6)
    assert losses_of(WORDS_TINY, ONE_BATCH, 4)[0] != pytest.approx(synchronous[0], rel=1e-6)


def test_synchronous_towers_without_batch_norm_are_one_large_batch():
    large = losses_of(WORDS_TINY, ONE_BATCH, 0)
    assert losses_of(WORDS_TINY, SYNCHRONOUS, 0) == pytest.approx(large, rel=1e-4)
    assert losses_of(WORDS_TINY, ASYNCHRONOUS, 0)[1:] != pytest.approx(large[1:], rel=1e-3)


def test_batch_norm_sees_a_towers_batch_alone():
    task = few(IMAGES, 1, batch=3, width=0.0625)
    assert losses_of(task, SYNCHRONOUS, 0) != pytest.approx(losses_of(task, ONE_BATCH, 0), rel=1e-4)


def test_asynchronous_towers_each_step_by_a_gradient_at_what_they_pulled_last():
    """Against the rule written out: RMSProp's recurrence on each parameter, tower after tower."""
    rate, decay, epsilon = 1e-3, 0.9, 1e-3
    task = replace(WORDS_TINY, server=IMAGES.server, steps=3)
    parts = task.data(task.options, 12, torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    module, _, loss, _ = NETWORKS["nmt"].build(**task.options)
    center = [p.detach().clone() for p in module.parameters()]
    squares = [torch.zeros_like(p) for p in center]

    def computed(part):
        """The loss and the gradient of the next part, at the center as it is now."""
        inputs, targets = part
        with torch.no_grad():
            for p, now in zip(module.parameters(), center, strict=True):
                p.copy_(now)
        value = loss(module(*inputs), *targets)
        return value.item(), torch.autograd.grad(value, list(module.parameters()))

    # All towers take equally long, so each in turn commits what it computed at its last pull.
    waiting, losses = [computed(part) for part in parts[:4]], []
    for update in range(12):
        value, gradient = waiting[update % 4]
        losses.append(value)
        for now, square, g in zip(center, squares, gradient, strict=True):
            square.copy_(decay * square + (1 - decay) * g * g)
            now -= rate * g / (square.sqrt() + epsilon)
        if update + 4 < 12:
            waiting[update % 4] = computed(parts[update + 4])
    expected = [sum(losses[step : step + 4]) / 4 for step in (0, 4, 8)]
    assert losses_of(task, ASYNCHRONOUS, 0) == pytest.approx(expected, rel=1e-4)
    assert losses_of(task, ASYNCHRONOUS, 0)[2] != pytest.approx(
        losses_of(replace(task, optimizer=IMAGES.optimizer), SYNCHRONOUS, 0)[2], rel=1e-4
    )


def test_curves_take_their_losses_from_the_way_that_they_learn():
    losses = {"A": {ONE_BATCH: [2.0, 1.0], SYNCHRONOUS: [3.0, 2.0]}}
    seconds = {"A": {"expert": 2.0, "planned": 1.0, "synchronous towers": 0.5}}
    found = curves(seconds, losses)
    assert [(c.title, c.name, c.step_seconds, c.losses) for c in found] == [
        ("A", "expert", 2.0, [2.0, 1.0]),
        ("A", "planned", 1.0, [2.0, 1.0]),
        ("A", "synchronous towers", 0.5, [3.0, 2.0]),
    ]


def test_training_leaves_torchs_random_numbers_and_threads_alone():
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    found = towers.train([replace(WORDS_TINY, steps=1)])
    assert list(found) == ["NMT"]
    assert list(found["NMT"]) == [ONE_BATCH]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'dovetail\[bench\]'") as error:
        losses_of(few(IMAGES, 1), ONE_BATCH, 0)
    assert error.value.library == "scikit-learn"
