"""The recipe of the shipped policy: one call, from random graphs to a policy file with its card.

    training set ──► targets ──► imitation ──► PPO over all tasks in turn ──► policy file
    (`training_set`)  (`cloning`)  (a start)     (GDP-batch, `learning`)         with its card
                                      └── validation: random tasks of other seeds ──┘

Y. Zhou et al., "GDP: Generalized Device Placement for Dataflow Graphs", 2019,
https://arxiv.org/abs/1910.01578, section 3.4 (GDP-batch: one policy for many graphs) and 4.4.
Differences: the paper trains on other networks alone and from a random start; here the set is
mostly random graphs, and the policy first imitates what classical methods find there. What PPO
adds to that is measured on validation tasks and stands in the card.

All of it is kept in the folder of the run, stage by stage: captured graphs, targets, the policy
after each pass of imitation, and PPO's own run, which a resumed recipe goes on with.
"""

import hashlib
import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.errors import RunMismatchError
from dovetail.placers.learned.cloning import Example, clone, good_placement, likeness_of
from dovetail.placers.learned.features import look
from dovetail.placers.learned.files import load_policy, save_policy
from dovetail.placers.learned.gdp import Gdp
from dovetail.placers.learned.learning import learn
from dovetail.placers.learned.placing import proposals
from dovetail.placers.learned.records import Point, Settings, Task
from dovetail.placers.learned.training_set import HELD_OUT, Wanted, random_task, training_set
from dovetail.placers.problem import Problem
from dovetail.runtime.atomic import write_atomically

VALIDATION_SEED = 10**6
"""Added to the seed for tasks that nothing is learned from."""
SETTINGS = Settings(
    objective="ppo",
    trials=16,
    rate=2e-4,
    baseline="batch",
    failing=10.0,
    normalised=True,
    passes=2,
    elite=1.0,
)
"""Of PPO over many graphs: more careful than on one alone, and without a reward for entropy."""


@dataclass(frozen=True)
class Recipe:
    """What is done.

    wanted        the training set
    options       of the policy
    evaluations   that the search for a target may spend
    passes        of imitation over the set; `imitation_rate`: Adam's at their start
    trials        of PPO, over all tasks; `settings`: its own
    validation    random tasks of other seeds
    """

    wanted: Wanted = field(default_factory=Wanted)
    options: dict[str, Any] = field(default_factory=dict)
    evaluations: int = 2000
    passes: int = 20
    imitation_rate: float = 1e-3
    trials: int = 400_000
    settings: Settings = SETTINGS
    validation: int = 24


@dataclass(frozen=True)
class Progress:
    """stage    "capture", "target", "imitation", "validation" or "ppo"
    done, of   of its steps
    text       what is being done, or what has come out
    point      of PPO, else None
    """

    stage: str
    done: int
    of: int
    text: str = ""
    point: Point | None = None


def pretrain(
    out: Path,
    *,
    folder: Path,
    seconds: float | None = None,
    trials: int | None = None,
    seed: int = 0,
    recipe: Recipe | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, object]:
    """Follow the recipe, write the policy to `out`, and return its card.

    folder    of the run: what is there already is not done again
    seconds   of PPO, and as many at most of imitation; None: as the recipe says
    trials    of PPO instead of the recipe's

    The same seed, recipe, and number of trials give the same policy; with `seconds` the machine
    has a say. Ctrl-C within PPO ends it there. Raises what `learn` and captures raise, and
    `RunMismatchError` for the folder of another seed or recipe.
    """
    recipe = recipe or Recipe()
    if trials is not None:
        recipe = replace(recipe, trials=trials)
    run = _Run(folder, recipe, seed, seconds, progress or _silent)
    tasks = training_set(folder, recipe.wanted, seed, lambda text: run.tell("capture", 0, 0, text))
    _check_held_out(tasks)
    examples = run.examples(tasks)
    validation = [
        random_task(seed + VALIDATION_SEED, number, recipe.wanted.size)
        for number in range(recipe.validation)
    ]
    policy, losses = run.imitated(examples)
    imitated = run.validate(policy, validation, "imitation")
    learned = run.learn(policy, tasks)
    finished = run.validate(policy, validation, "ppo")
    card = run.card(tasks, losses, imitated, finished, learned)
    save_policy(out, policy, card)
    return card


def policy_of(recipe: Recipe, seed: int) -> Gdp:
    """The policy that the recipe begins with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gdp(**recipe.options)


@dataclass
class _Run:
    folder: Path
    recipe: Recipe
    seed: int
    seconds: float | None
    progress: Callable[[Progress], None]
    began: float = field(default_factory=time.time)

    @property
    def made_by(self) -> dict[str, Any]:
        """What imitation depends on, as JSON knows it."""
        recipe = asdict(self.recipe)
        kept = ("wanted", "options", "evaluations", "passes", "imitation_rate")
        found: dict[str, Any] = {"seed": self.seed, **{key: recipe[key] for key in kept}}
        return dict(json.loads(json.dumps(found)))

    def tell(self, stage: str, done: int, of: int, text: str, point: Point | None = None) -> None:
        self.progress(Progress(stage, done, of, text, point))

    def examples(self, tasks: Sequence[Task]) -> list[Example]:
        """Those tasks that have a target which fits."""
        found = []
        for number, task in enumerate(tasks):
            problem = task.problem(seed=self.seed, threads=1)
            view = look(problem)
            target, _ = self.target(task, problem)
            if target is not None and view.free.any():
                found.append(Example(view, target, likeness_of(problem)))
            self.tell("target", number + 1, len(tasks), task.name)
        return found

    def target(self, task: Task, problem: Problem) -> tuple[NDArray[np.int32] | None, float]:
        """(what the search finds for the task, its seconds), from its file if it is there; None:
        nothing that fits."""
        name = f"{task.graph.fingerprint}-{task.machine.fingerprint}-{task.groups.count}"
        key = hashlib.sha256(f"{task.name} {self.recipe.evaluations}".encode()).hexdigest()[:8]
        path = self.folder / "targets" / f"{name}-{key}.npz"
        if path.is_file():
            with np.load(path) as kept:
                placement, value = kept["placement"], float(kept["seconds"])
        else:
            score, placement = good_placement(problem, look(problem), self.recipe.evaluations)
            value = np.inf if score.lacking_bytes else score.value
            path.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.savez(content, placement=placement, seconds=value)
            write_atomically(path, content.getvalue())
        return (placement.astype(np.int32), value) if np.isfinite(value) else (None, np.inf)

    def imitated(self, examples: Sequence[Example]) -> tuple[Gdp, list[float]]:
        """The policy after imitation, and the loss of each pass. Raises `RunMismatchError` where
        the folder holds one by another seed or recipe."""
        path, notes = self.folder / "imitated.safetensors", self.folder / "imitation.json"
        policy, losses = policy_of(self.recipe, self.seed), []
        if notes.is_file():
            kept = json.loads(notes.read_text(encoding="utf-8"))
            for key, value in self.made_by.items():
                if kept.get(key) != value:
                    raise RunMismatchError(str(self.folder), key, value, kept.get(key))
            losses = kept["losses"]
            policy = _as_gdp(load_policy(path, "gdp")[0])
            if kept["done"]:
                return policy, losses
        ends = None if self.seconds is None else time.time() + self.seconds
        before = len(losses)

        def note(number: int, loss: float) -> bool:
            losses.append(loss)
            done = number + 1 == self.recipe.passes - before
            done |= ends is not None and time.time() > ends
            save_policy(path, policy, {"seed": self.seed})
            held = {"losses": losses, "done": done, **self.made_by}
            write_atomically(notes, json.dumps(held).encode())
            self.tell("imitation", len(losses), self.recipe.passes, f"{loss:.3f} nats")
            return not done

        share = 1 - before / max(1, self.recipe.passes)
        clone(
            policy, examples, passes=self.recipe.passes - before, seed=self.seed + before,
            rate=self.recipe.imitation_rate * max(share, 0.1), progress=note,
        )  # fmt: skip
        return policy, losses

    def learn(self, policy: Gdp, tasks: Sequence[Task]) -> dict[str, float]:
        """PPO over all tasks in turn; how many trials, updates and seconds that took."""
        folder, trials = self.folder / "ppo", self.recipe.trials
        if trials < self.recipe.settings.trials:
            return {"trials": 0, "updates": 0, "seconds": 0.0}
        learned = learn(
            tasks, policy, self.recipe.settings, trials=trials, seconds=self.seconds,
            backend="simulated", folder=folder, resume=folder.exists(), seed=self.seed,
            progress=lambda point: self.tell("ppo", point.trials, trials, point.task, point),
        )  # fmt: skip
        return {"trials": learned.trials, "updates": learned.updates, "seconds": learned.seconds}

    def validate(self, policy: Gdp, tasks: Sequence[Task], stage: str) -> dict[str, float]:
        """Geometric means over tasks that nothing was learned from, of zero-shot seconds by those
        of the search: of the likeliest placement, and of the best that is proposed."""
        likeliest, best, failed = [], [], 0
        for number, task in enumerate(tasks):
            problem = task.problem(seed=self.seed, threads=1)
            _, value = self.target(task, problem)
            view = look(problem)
            proposed = np.concatenate(list(proposals(policy, view, self.seed)))
            found = problem.evaluate(problem.spread(proposed))
            seconds = np.where(found.feasible, found.values, np.inf)
            if np.isfinite(value) and np.isfinite(seconds[0]):
                likeliest.append(seconds[0] / value)
            if np.isfinite(value) and np.isfinite(seconds.min()):
                best.append(seconds.min() / value)
            failed += int(np.isfinite(value) and not np.isfinite(seconds.min()))
            self.tell("validation", number + 1, len(tasks), stage)
        means = {"likeliest": _geometric(likeliest), "best": _geometric(best)}
        self.tell("validation", len(tasks), len(tasks), f"{stage}: {means}, {failed} failed")
        return {**means, "failed": float(failed)}

    def card(
        self,
        tasks: Sequence[Task],
        losses: list[float],
        imitated: dict[str, float],
        finished: dict[str, float],
        learned: dict[str, float],
    ) -> dict[str, object]:
        recipe = asdict(self.recipe)
        return {
            "trained_on": [task.name for task in tasks],
            "held_out": list(HELD_OUT),
            "seed": self.seed,
            "updates": int(learned["updates"]),
            "trials": int(learned["trials"]),
            "seconds": learned["seconds"],
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
            "recipe": json.dumps(recipe, sort_keys=True),
            "imitation_losses": json.dumps([round(loss, 4) for loss in losses]),
            "validation": json.dumps({"imitation": imitated, "ppo": finished}),
        }


def _check_held_out(tasks: Sequence[Task]) -> None:
    seen = [task.name for task in tasks for family in HELD_OUT if family in task.name]
    assert not seen, f"held-out families are in the training set: {seen}"


def _as_gdp(policy: object) -> Gdp:
    assert isinstance(policy, Gdp), "the file was checked to be of gdp"
    return policy


def _geometric(ratios: list[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else float("nan")


def _silent(_progress: Progress) -> None:
    pass
