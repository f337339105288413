"""A network small enough to know: y = X w in numpy, by the mean of (y - X w)^2 / 2."""

import numpy as np

from dovetail.training.learner import Gradient
from dovetail.training.records import Job

SIZE = 6


class LeastSquares:
    """Steps of plain SGD. `seen`: the samples of each gradient, in order, as (epoch, index)."""

    def __init__(self, job, lr=0.05, stream=None):
        rng = np.random.default_rng(11)
        self.inputs = rng.normal(size=(job.samples or 64, job.size))
        self.solution = rng.normal(size=job.size)
        self.targets = self.inputs @ self.solution
        self.dtype = np.dtype(job.dtype)
        self.lr = lr
        self.stream = stream  # samples until its end
        self.seen, self.rates = [], []

    def gradient(self, theta, indices, epoch):
        if self.stream is not None:
            indices = indices[indices < self.stream]
        self.seen += [(epoch, index) for index in indices.tolist()]
        inputs = self.inputs[indices % len(self.inputs)]
        with np.errstate(invalid="ignore"):  # tests poison theta
            errors = inputs @ theta.astype(np.float64) - self.targets[indices % len(self.inputs)]
        count = max(1, len(indices))
        vector = (inputs.T @ errors / count).astype(self.dtype)
        return Gradient(vector, float(errors @ errors / 2 / count), len(indices))

    def update(self, theta, gradient, epoch):
        self.rates.append(epoch)
        return gradient * gradient.dtype.type(-self.rate(epoch))

    def rate(self, epoch):
        return self.lr

    def loss(self, theta):
        errors = self.inputs @ theta - self.targets
        return float(errors @ errors / 2 / len(errors))


def a_job(**fields):
    given = {"run": "r", "size": SIZE, "samples": 60, "epochs": 1, "batch": 4, "window": 3}
    return Job(**{**given, **fields})


def start(job):
    return np.linspace(-1, 1, job.size).astype(job.dtype)
