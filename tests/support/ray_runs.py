"""Learners for actors, and what the tests ask of a run."""

import json
import os
import signal
import time
from contextlib import ExitStack
from functools import cache, partial

import numpy as np
import ray

from dovetail.training import serving
from dovetail.training.backends.contract import Assignment, Watcher
from dovetail.training.backends.ray import server
from dovetail.training.learner import Gradient
from dovetail.training.records import Job
from dovetail.training.rules import make_rule
from tests.support.doors import Doors
from tests.support.server_faults import Lives, faulty, faulty_files

SMALL = {"worker_cores": 0.1, "server_cores": 0.1}


class Squares:
    """Least squares: loss is the mean of (x . theta - y)^2 / 2 over the batch; plain SGD.

    does    {step: what happens in it}: "raise" | "nan" | "hang" | "die"
    hold    called before each step with the number of those before it
    """

    def __init__(self, samples, size, sleep=0.0, does=None, hold=None):
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((samples, size)).astype(np.float32)
        self.y = self.x @ np.ones(size, np.float32)
        self.sleep, self.does, self.steps = sleep, does or {}, 0
        self.hold = hold

    def gradient(self, theta, indices, epoch):
        if self.hold is not None:
            self.hold(self.steps)
        self.steps += 1
        time.sleep(self.sleep)
        error = self.x[indices] @ theta - self.y[indices]
        gradient = error @ self.x[indices] / np.float32(len(indices))
        match self.does.get(self.steps):
            case "raise":
                raise ValueError("a learner's own mistake")
            case "nan":
                gradient = gradient * np.float32("nan")
            case "hang":
                time.sleep(1000)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return Gradient(gradient, float(error @ error) / 2 / len(indices), len(indices))

    def update(self, theta, gradient, epoch):
        return np.float32(-0.05) * gradient

    def rate(self, epoch):
        return 0.05


class Counts:
    """Counts what it is trained on: element i of the center ends as the times that sample i was.
    Exact in any order of commits, by rules that add them up.

    hold    called before each step with its center's sum: the samples that were committed when it
            was pulled, and its own since
    nan_at  the number of a step, from 1, whose gradient is no number
    """

    def __init__(self, samples, hold=None, nan_at=0):
        self.samples, self.hold, self.nan_at = samples, hold, nan_at
        self.steps = 0

    def gradient(self, theta, indices, epoch):
        if self.hold is not None:
            self.hold(theta.sum())
        self.steps += 1
        vector = np.bincount(indices, minlength=self.samples).astype(np.float32)
        if self.steps == self.nan_at:
            vector[0] = np.nan
        return Gradient(vector, 0.0, len(indices))

    def update(self, theta, gradient, epoch):
        return gradient

    def rate(self, epoch):
        return 1.0


class Digits:
    """scikit-learn's digits by a 64-32-10 network with tanh, softmax loss, plain SGD."""

    SHAPES = ((64, 32), (32,), (32, 10), (10,))
    SIZE = sum(int(np.prod(shape)) for shape in SHAPES)

    def __init__(self, hold=None):
        self.x, self.y = digits()[:2]
        self.steps, self.hold = 0, hold

    def gradient(self, theta, indices, epoch):
        self.steps += 1
        if self.hold is not None:
            self.hold(self.steps)
        x, y = self.x[indices], self.y[indices]
        weights, bias, weights_out, bias_out = parts(theta)
        hidden = np.tanh(x @ weights + bias)
        share = softmax(hidden @ weights_out + bias_out)
        loss = -np.log(share[np.arange(len(y)), y] + 1e-12).mean()
        share[np.arange(len(y)), y] -= 1
        share /= len(y)
        back = (share @ weights_out.T) * (1 - hidden**2)
        found = (x.T @ back, back.sum(0), hidden.T @ share, share.sum(0))
        vector = np.concatenate([part.ravel() for part in found]).astype(np.float32)
        return Gradient(vector, float(loss), len(y))

    def update(self, theta, gradient, epoch):
        return np.float32(-0.2) * gradient

    def rate(self, epoch):
        return 0.2


def noting(make, folder, worker, of=0):
    """The worker's learner. Notes which GPU Ray gave the worker, and which device that is to it.

    of   the workers that must be there, all at once, before this one goes on; 0: none
    """
    import torch

    from dovetail.training.modules import device_of

    numbers = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    torch.cuda.device_count = lambda: len(numbers)  # what torch sees where there are cards
    facts = {"ids": ray.get_gpu_ids(), "visible": numbers, "device": device_of("cuda", worker)}
    (folder / f"{worker}.json").write_text(json.dumps(facts))
    if of:
        Doors(folder).meet("begun", worker, of=of)
    return make(worker)


@cache
def digits():
    """Samples and labels to train on, then those to validate on."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    shuffled = np.random.default_rng(0).permutation(len(y))
    x, y = (x[shuffled] / 16).astype(np.float32), y[shuffled]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def parts(theta):
    cuts = np.cumsum([int(np.prod(shape)) for shape in Digits.SHAPES])[:-1]
    pieces = np.split(theta, cuts)
    return [piece.reshape(shape) for piece, shape in zip(pieces, Digits.SHAPES, strict=True)]


def softmax(scores):
    share = np.exp(scores - scores.max(1, keepdims=True))
    return share / share.sum(1, keepdims=True)


def accuracy(theta):
    """On the digits that were not trained on."""
    weights, bias, weights_out, bias_out = parts(theta)
    scores = np.tanh(digits()[2] @ weights + bias) @ weights_out + bias_out
    return float((scores.argmax(1) == digits()[3]).mean())


def assign(rule="downpour", *, run="run", learner=None, samples=64, size=8, workers=2, **more):
    """An assignment of least squares: 2 epochs of windows of 2 steps of 4 samples."""
    job = Job(run, size, samples, more.pop("epochs", 2), 4, 2, workers, seed=3)
    make = learner or (lambda worker: Squares(samples, size))
    start = more.pop("start", np.zeros(size, np.float32))
    return Assignment(job, make_rule(rule), start, make, **more)


def assign_counts(run, samples=128, hold=None, nan_at=0, **more):
    """Three epochs of counting, by DOWNPOUR, in commits of 8 samples; `hold(worker, sum of its
    center)` is called before each step."""

    def learner(worker):
        return Counts(samples, hold and partial(hold, worker), nan_at)

    return assign(run=run, size=samples, samples=samples, epochs=3, learner=learner, **more)


def each_sample_once_an_epoch(outcome):
    """Whether no commit was lost and none doubled, by the center itself."""
    return bool((outcome.theta == 3).all()) and counted(outcome) == 3 * outcome.theta.size


def in_turn(assignment):
    """An order of turns that two workers keep to the end: each asks for its first window, then
    ends as many as the other."""
    job = assignment.job
    windows = job.samples // (job.batch * job.window) * job.epochs
    turns = 2 if assignment.rule.pulls_first else 1
    ends = (0,) * turns + (1,) * turns
    return (0, 1) + ends * (windows // 2)


def dying_server(path):
    """The server's actor, of which each life ends as the `Lives` in that file say."""

    class DyingServer(server.ParameterServer):
        def __init__(self, *fields):
            crash = Lives.begin(path)
            serving.Server = faulty(serving.Server, crash)
            self.faults = ExitStack()  # kept open: the process is this actor's alone
            self.faults.enter_context(faulty_files(crash))
            super().__init__(*fields)

    return DyingServer


def once(rows, action):
    """A watcher that does something once so many commits are known, before which `held_until` lets
    nobody go on."""
    seen, done = [], []

    def watch(new):
        seen.extend(new)
        if len(seen) >= rows and not done:
            done.append(True)
            action()

    return Watcher(rows=watch)


def held_until(doors, name, rows):
    """What holds workers at a door from so many commits of `assign_counts` on, which two workers
    have made: both begin at once."""

    def hold(worker, committed):
        doors.meet("begun", worker, of=2)
        if committed >= 8 * rows:
            doors.wait(name)

    return hold


def actor(run, name):
    return ray.get_actor(name, namespace=f"dovetail-{run}")


def kill(run, name):
    """Kill the actor's process: from now on it answers nobody, as it may for a while after
    `ray.kill`, which only asks for its end. Ray starts it again as often as it may."""
    state = ray._private.state.actors(actor(run, name)._actor_id.hex())
    os.kill(state["Pid"], signal.SIGKILL)


def counted(outcome):
    """Samples that the commits say, by worker and sequence: each once."""
    commits = [(row.worker, row.sequence) for row in outcome.rows]
    assert len(set(commits)) == len(commits)
    return sum(row.samples for row in outcome.rows)


def kinds(outcome):
    return [event.kind for event in outcome.events]
