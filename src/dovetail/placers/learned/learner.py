"""A controller: draws placements, has them judged, and says how the policy is to change.

A. Mirhoseini et al.: Device Placement Optimization with Reinforcement Learning, ICML 2017,
https://arxiv.org/abs/1706.04972, section 3.4.

    theta ─► policy ─ draw K ─► judge ─► advantages ─► loss ─► gradient ─► Adam ─► U(g)
                         ▲                   ▲ own baseline of each task        │ theta += U(g)
                     (seed, sample)                                     server, or our own loop

One `gradient` is one update: K trials of one task, the tasks in turn. It is a `training.Learner`,
so any backend and any rule whose workers step can drive it; one learner alone is the whole of
training in one process. REINFORCE gives the gradient, and `update` is Adam's step; PPO takes its
passes, an Adam step each, within `gradient`, which returns minus the way they went, and `update`
turns it around.

What is drawn is keyed by the seed and by the first of the samples' indices, not by what came
before; all else is in the log's state, so a learner that comes back goes on bit for bit.
Differences: RL17's controllers send gradients to a server that steps; here each has Adam's state of
its own. A gradient that is not finite, and a batch that teaches nothing, change nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dovetail.placers.learned.adam import VectorAdam
from dovetail.placers.learned.log import ControllerLog, LearnerState, LogEntry
from dovetail.placers.learned.losses import Baseline, ppo, reinforce, teaching, with_elite
from dovetail.placers.learned.policy import Policy
from dovetail.placers.learned.records import Float32, Judge, LearningSettings, Point, ProblemView
from dovetail.training import Gradient, Vector, alive

LOSSES = {"reinforce": reinforce, "ppo": ppo}


@dataclass(frozen=True, eq=False)
class TaskView:
    """A task as a policy sees it."""

    name: str
    view: ProblemView


@dataclass(frozen=True, eq=False)
class BestPlacement:
    """The best valid placement of a task [groups], its seconds, and the trials up to it."""

    placement: NDArray[np.int32]
    seconds: float
    found: int


def parameters_of(policy: Policy) -> Float32:
    """A copy of a policy's parameters [size], as learners flatten them."""
    return np.array(parameters_to_vector(policy.parameters()).detach().cpu().numpy())


def write_parameters(policy: Policy, theta: Vector) -> None:
    """Write `theta` [size] over a policy's parameters."""
    first = next(policy.parameters())
    vector_to_parameters(torch.from_numpy(np.array(theta)).to(first), policy.parameters())


class FlatParameters:
    """A policy whose parameters, and their gradients, are views of one vector each [size]."""

    def __init__(self, policy: Policy) -> None:
        assert all(p.dtype == torch.float32 for p in policy.parameters()), "policies are float32"
        self.theta = parameters_to_vector(policy.parameters()).detach()
        self.gradient = torch.zeros_like(self.theta)
        start = 0
        for parameter in policy.parameters():
            stop = start + parameter.numel()
            parameter.data = self.theta[start:stop].view(parameter.shape)
            parameter.grad = self.gradient[start:stop].view(parameter.shape)
            start = stop

    def read(self) -> Float32:
        """A copy of the parameters [size]."""
        return np.array(self.theta.detach().cpu().numpy())

    def write(self, theta: Vector) -> None:
        """The policy at `theta` [size]."""
        self.theta.copy_(torch.from_numpy(np.array(theta, dtype=np.float32)))

    def descend(self, loss: Tensor, most_norm: float) -> bool:
        """Put the loss's gradient into `gradient`, cut to that L2 norm; False: it is not finite."""
        self.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.linalg.vector_norm(self.gradient))
        if not np.isfinite(norm):
            return False
        if norm > most_norm:
            self.gradient.mul_(most_norm / norm)
        return True


class PolicyLearner:
    """A controller of one policy over some tasks; see `training.learner.Learner`.

    tasks        in turn: this controller begins with number `controller`, cyclically
    judges       one of each task
    folder       of the run, where its state and its updates are kept; None: nowhere
    origin       `time.time()` of the run's start, for the points' seconds
    listen       called with each point
    policy       becomes this learner's
    """

    def __init__(
        self,
        policy: Policy,
        tasks: Sequence[TaskView],
        judges: Sequence[Judge],
        settings: LearningSettings,
        *,
        seed: int = 0,
        controller: int = 0,
        folder: Path | None = None,
        origin: float | None = None,
        listen: Callable[[Point], None] | None = None,
    ) -> None:
        assert len(tasks) == len(judges) > 0
        self.policy, self.settings = policy, settings
        self.seen, self.judges, self.controller = list(tasks), list(judges), controller
        self.flat = FlatParameters(policy)
        self.updates = self.trials = 0
        self.points: list[Point] = []
        self.best: dict[str, BestPlacement] = {}
        self._seed, self._listen = seed, listen
        self._origin = time.time() if origin is None else origin
        self._loss = LOSSES[settings.objective]
        self._adam = VectorAdam(self.flat.theta)
        self._baselines = [Baseline.of(settings) for _ in self.seen]
        self._counts = [0] * len(self.seen)
        self._log = None if folder is None else ControllerLog(folder, controller)
        self._began = self._moves = False
        self._entry: LogEntry | None = None

    @property
    def theta(self) -> Float32:
        """A copy of the parameters [size] that the learner has come to by itself."""
        return self.flat.read()

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        """One update at `theta`: of as many trials as there are indices."""
        settings, policy, flat, first = self.settings, self.policy, self.flat, int(indices[0])
        # It begins where a former self has left off, before these samples.
        state = None if self._began or self._log is None else self._log.recall(first)
        self._began = True
        if state is not None:
            fields, arrays = state.fields, state.arrays
            self.updates, self.trials = state.updates, fields["trials"]
            self._counts = list(fields["counts"])
            self._baselines = [Baseline(**entry) for entry in fields["baselines"]]
            self._adam.steps = fields["steps"]
            self._adam.mean.copy_(torch.from_numpy(arrays["mean"]))
            self._adam.square.copy_(torch.from_numpy(arrays["square"]))
            self.best = {
                name: BestPlacement(arrays[f"best {name}"], seconds, found)
                for name, (seconds, found) in fields["best"].items()
            }
        if self._entry is not None:  # a rule whose server steps: nobody called `update`
            self._end_update()
        flat.write(theta)

        # Draw, by a key of the seed and of the first sample, and have it judged.
        number = (self.updates + self.controller) % len(self.seen)
        name, view = self.seen[number].name, self.seen[number].view
        policy.begin(self.updates)
        key = np.random.SeedSequence((self._seed, first)).generate_state(1, np.uint64)
        generator = torch.Generator(device=flat.theta.device)
        generator.manual_seed(int(key[0] >> np.uint64(1)))
        draw = policy.draw(view, len(indices), generator)
        alive()
        trials = self.judges[number](draw.placements)
        alive()

        # Count the trials, and note the best so far: `at` among the judged ones, -1 if none is.
        judged = np.flatnonzero(trials.judged)
        ran = trials.judged & trials.valid
        seconds = np.where(trials.valid, trials.seconds, np.inf)[judged]
        before, at = self._counts[number], -1
        self._counts[number] += len(judged)
        self.trials += len(judged)
        known = self.best[name].seconds if name in self.best else np.inf
        if len(judged) and seconds.min() < known:
            at = int(seconds.argmin())
            placement = np.array(draw.placements[judged[at]], dtype=np.int32)
            self.best[name] = BestPlacement(placement, float(seconds[at]), before + at + 1)
        best = self.best.get(name)

        # Learn from them: what it leads to is put into the flat gradient.
        found = self._baselines[number].advantages(trials, settings, self.updates)
        self._moves, losses = False, [0.0]
        if teaching(trials, settings, self.updates).any():
            advantages = torch.from_numpy(found).to(flat.theta)
            taught = draw
            if settings.elite and best is not None:
                taught, advantages = with_elite(
                    policy, view, draw, advantages, best.placement, settings.elite
                )
            if settings.objective != "ppo":
                loss = self._loss(policy, view, taught, advantages, settings)
                self._moves = flat.descend(loss, settings.gradient_norm)
                losses = [float(loss.detach())]
            else:
                start, rate, losses = flat.theta.clone(), self.rate(0.0), []
                for _ in range(settings.passes):
                    alive()
                    loss = self._loss(policy, view, taught, advantages, settings)
                    losses.append(float(loss.detach()))
                    if not flat.descend(loss, settings.gradient_norm):
                        break
                    flat.theta += self._adam.step(flat.gradient, rate)
                    self._moves = True
                torch.sub(start, flat.theta, out=flat.gradient)
        if not self._moves:
            flat.gradient.zero_()

        # Nats a decision that was open, estimated by what was drawn: its mean surprise.
        surprises = -draw.log_probs
        decisions = len(surprises) * int((surprises != 0).any(dim=0).sum())
        point = Point(
            controller=self.controller,
            update=self.updates,
            task=name,
            trials=self.trials,
            seconds=time.time() - self._origin,
            best=float("inf") if best is None else best.seconds,
            mean=float(trials.seconds[ran].mean()) if ran.any() else float("nan"),
            invalid=1.0 - float(ran.sum()) / len(judged) if len(judged) else float("nan"),
            entropy=float(surprises.sum()) / decisions if decisions else 0.0,
            loss=float(np.mean(losses)),
        )
        newest = None if at < 0 or best is None else best.placement
        self._entry = LogEntry(point, first, len(judged), at, newest)
        return Gradient(flat.gradient.cpu().numpy(), point.loss, len(indices))

    def update(self, theta: Vector, gradient: Vector, epoch: float) -> Vector:
        """U(g): Adam's step, or PPO's way turned around; once for each gradient."""
        if self.settings.objective == "ppo":
            change = -gradient
        elif self._moves:
            step = self._adam.step(
                torch.from_numpy(np.array(gradient)).to(self.flat.theta), self.rate(epoch)
            )
            change = step.cpu().numpy()
        else:
            change = np.zeros_like(gradient)
        self.flat.write(theta + change)
        self._end_update()
        return change

    def step(self, count: int | None = None) -> None:
        """One update of so many trials by this learner alone, without a server: theta += U(g).
        `count` None: as many as the settings say."""
        first = self.updates * self.settings.trials
        indices = np.arange(first, first + (count or self.settings.trials))
        theta = self.theta
        self.update(theta, self.gradient(theta, indices, 0).vector, 0.0)

    def rate(self, epoch: float) -> float:
        """Adam's learning rate at this controller's present update, whatever the epoch."""
        settings = self.settings
        decays = max(0, self.updates - settings.decay_from) // settings.decay_every
        return settings.rate * settings.decay**decays

    def close(self) -> None:
        """End the log."""
        if self._log is not None:
            self._log.close()

    def _end_update(self) -> None:
        """Write down what the update has found, and where it leaves this learner."""
        entry = self._entry
        assert entry is not None, "one update for each gradient"
        self._entry, self.updates = None, self.updates + 1
        self.points.append(entry.point)
        if self._log is not None:
            self._log.add(entry)
            fields = {
                "trials": self.trials,
                "counts": self._counts,
                "steps": self._adam.steps,
                "baselines": [asdict(baseline) for baseline in self._baselines],
                "best": {name: [best.seconds, best.found] for name, best in self.best.items()},
            }
            mean, square = self._adam.mean.cpu().numpy(), self._adam.square.cpu().numpy()
            arrays = {"mean": mean, "square": square}
            arrays |= {f"best {name}": best.placement for name, best in self.best.items()}
            self._log.keep(LearnerState(self.updates, entry.first, fields, arrays))
        if self._listen is not None:
            self._listen(entry.point)
