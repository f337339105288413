"""The recipe of the shipped policy: from random graphs to a policy file with its card.

    python benchmarks/learned/pretrain.py --out policy.safetensors --folder run

That takes hours; `--graphs 2 --networks 0 --passes 1 --trials 32` makes it a minute.

    training set ──► targets ──► imitation ──► PPO over all tasks in turn ──► policy file
    (`training_set`)  (`cloning`)  (a start)     (GDP-batch, `learning`)         with its card
                                      └── validation: random tasks of other seeds ──┘

Y. Zhou et al., "GDP: Generalized Device Placement for Dataflow Graphs", 2019,
https://arxiv.org/abs/1910.01578, section 3.3 (GDP-batch: one policy for many graphs) and 4.4.
Differences: the paper trains on other networks alone and from a random start; here the set is
mostly random graphs, and the policy first imitates what classical methods find there. What PPO
adds to that is measured on validation tasks and stands in the card.

All of it is kept in the folder of the run, stage by stage: captured graphs, targets, the policy
after each pass of imitation, and PPO's own run. The same command goes on where it was stopped.
"""

import hashlib
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from harness import parser_of, say
from numpy.typing import NDArray
from random_graphs import FAMILIES, random_graph, random_machine
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dovetail.costs import analytic_costs
from dovetail.errors import RunMismatchError
from dovetail.frontends import parse_optimizer, resolve
from dovetail.graph import Graph, Groups, colocate, group
from dovetail.graph.files import load_graph, save_graph
from dovetail.graph.grouping import merge_single_consumers
from dovetail.machine import Machine
from dovetail.machine.presets import paper_machine
from dovetail.placers.baselines import attempt, try_baselines
from dovetail.placers.budget import Budget, Score
from dovetail.placers.families import families
from dovetail.placers.learned.features import column, cut_placements, look
from dovetail.placers.learned.files import load_policy, save_policy
from dovetail.placers.learned.gdp import Gdp
from dovetail.placers.learned.learning import learn
from dovetail.placers.learned.placing import proposals
from dovetail.placers.learned.records import (
    Int64,
    LearningSettings,
    PlacementTask,
    Point,
    ProblemView,
)
from dovetail.placers.local_search import local_search
from dovetail.placers.multilevel import multilevel
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.files import write_atomically

# The graphs and machines that the shipped policy is pretrained on.
#
# Random networks on random machines, and small variants of the zoo's networks on the papers' and on
# random machines, grouped as placers group them and, every third, finer. The families in `HELD_OUT`
# are in none of them, so that what the policy does on those is zero-shot. Captured graphs are kept
# in the folder of the run, so that a repeat captures nothing.


HELD_OUT = ("gnmt", "amoebanet", "llama")
"""Families of networks that the shipped policy has never seen."""
NETWORKS: tuple[tuple[str, str], ...] = (
    ("zoo:rnnlm?layers=2&steps=8&hidden=1024", "adam"),
    ("zoo:rnnlm?layers=4&steps=8&batch=32", "adam"),
    ("zoo:rnnlm?layers=2&steps=20", "adam"),
    ("zoo:rnnlm?layers=8&steps=6&batch=128", "adam"),
    ("zoo:nmt?steps=5", "adam"),
    ("zoo:nmt?steps=10&batch=128", "adam"),
    ("zoo:nmt?steps=16&hidden=512", "adam"),
    ("zoo:nmt?layers=4&steps=6", "adam"),
    ("zoo:nmt?layers=6&steps=4&batch=128", "adam"),
    ("zoo:inception_v3?batch=16", "rmsprop"),
    ("zoo:inception_v3?batch=64", "rmsprop"),
    ("zoo:wavenet?stacks=2&layers=9", "adam"),
    ("zoo:wavenet?stacks=2&layers=18", "adam"),
    ("zoo:wavenet?stacks=3&layers=12&batch=4", "adam"),
    ("zoo:transformer_xl?layers=2", "adam"),
    ("zoo:transformer_xl?layers=4", "adam"),
    ("zoo:transformer_xl?layers=8&batch=8", "adam"),
    ("zoo:gpt2?layers=4&batch=4", "adam"),
    ("zoo:gpt2?layers=6&batch=4", "adam"),
    ("zoo:gpt2?layers=12&batch=2", "adam"),
    ("zoo:moe?layers=2&context=512", "adam"),
    ("zoo:vit?layers=6", "adam"),
    ("zoo:vit?layers=12&batch=16", "adam"),
    ("zoo:squeezenet_1_1", "rmsprop"),
    ("zoo:nasnet_a_mobile?cells=1", "rmsprop"),
    ("zoo:nasnet_a_mobile?cells=2", "rmsprop"),
    ("zoo:nasnet_a_large?cells=1", "rmsprop"),
    ("zoo:nasnet_a_large?cells=2&batch=8", "rmsprop"),
    ("zoo:randwire?nodes=10", "rmsprop"),
    ("zoo:randwire?nodes=20&seed=3", "rmsprop"),
    ("zoo:randwire?nodes=32", "rmsprop"),
    ("zoo:two_tower", "adam"),
)
"""(model, optimizer) in small sizes: what is to be learned is their structure."""
MACHINES = ("gdp/2", "gdp/4", "gdp/8")
FINEST_SHARE = 1 / 128
MOST_GROUPS = 600
"""Of a task: a coarser grouping is taken instead of one with more."""


@dataclass(frozen=True)
class ExampleSpec:
    """What the set consists of.

    random        random networks, the families in turn
    networks      (model, optimizer) of the zoo
    machines      on how many machines each of `networks` is
    size          of random networks
    """

    random: int = 200
    networks: tuple[tuple[str, str], ...] = NETWORKS
    machines: int = 4
    size: float = 1.0


def training_set(
    folder: Path, wanted: ExampleSpec, seed: int, tell: Callable[[str], None]
) -> list[PlacementTask]:
    """All tasks, the random ones first. `tell` hears of each network that is captured."""
    tasks = [random_task(seed, number, wanted.size) for number in range(wanted.random)]
    for number, (model, optimizer) in enumerate(wanted.networks):
        graph = captured(folder, model, optimizer, tell)
        for turn in range(wanted.machines):
            which = number * wanted.machines + turn
            if turn < len(MACHINES):
                machine = paper_machine(MACHINES[turn])
            else:
                machine = random_machine(_mixed(seed, 10**6 + which), graph)
            tasks.append(_task(f"{model} {optimizer} on {machine.name}", graph, machine, which))
    return tasks


def random_task(seed: int, number: int, size: float) -> PlacementTask:
    """Random network `number` of the set with that seed: of the families in turn, and each of them
    in turn in sizes from 0.4 to 1 times `size`."""
    families = list(FAMILIES)
    family, mixed = families[number % len(families)], _mixed(seed, number)
    optimizer = ("adam", "adam", "rmsprop", "sgd")[mixed % 4]
    size *= 0.4 + 0.05 * (number // len(families) % 13)
    graph = random_graph(mixed, family=family, size=size, optimizer=optimizer)
    machine = random_machine(mixed, graph)
    return _task(f"random {family} {mixed}", graph, machine, number)


def captured(folder: Path, model: str, optimizer: str, tell: Callable[[str], None]) -> Graph:
    """The graph of a network's step, from its file if it is there."""
    key = hashlib.sha256(f"{model} {optimizer}".encode()).hexdigest()[:12]
    path = folder / "graphs" / f"{key}.json.gz"
    if path.is_file():
        return load_graph(path)
    tell(f"capturing {model}")
    graph = resolve(model, train=parse_optimizer(optimizer)).graph
    path.parent.mkdir(parents=True, exist_ok=True)
    save_graph(graph, path)
    return graph


def _task(name: str, graph: Graph, machine: Machine, number: int) -> PlacementTask:
    costs = analytic_costs(graph, machine)
    return PlacementTask(name, graph, machine, costs, _groups(graph, fine=number % 3 == 2))


def _groups(graph: Graph, *, fine: bool) -> Groups:
    """Those of placers; `fine`: the finest that keep to the limit."""
    if not fine:
        return group(graph)
    finest = colocate(graph)
    if finest.count <= MOST_GROUPS:
        return finest
    finer = merge_single_consumers(graph, finest, largest_share=FINEST_SHARE)
    return finer if finer.count <= MOST_GROUPS else group(graph)


def _mixed(seed: int, number: int) -> int:
    """A seed for each number, with none in common between neighbouring seeds."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:6], "little")


# Imitation of good placements: where a policy begins before it learns from its own trials.
#
#     cuts by each position ┐
#     baselines, families   ├─► the best ─► local search ─► target [groups]
#                                                              │
#     view ─► policy ─► log pi [groups, devices] ──► L = -mean over groups of log pi(target)
#
# Behaviour cloning (D. Pomerleau, "Efficient Training of Artificial Neural Networks for Autonomous
# Navigation", Neural Computation 3(1), 1991, https://doi.org/10.1162/neco.1991.3.1.88). Devices
# that
# are alike can change places in a target without a change of its value, so of all such targets the
# one that the policy finds likeliest counts: an assignment problem a class of like devices (H. W.
# Kuhn, "The Hungarian method for the assignment problem", 1955,
# https://doi.org/10.1002/nav.3800020109). GDP itself begins at random; a policy that decides each
# group by itself needs very many trials from there.


INDEPENDENT = 30.0
"""Groups that a graph's many count for when a mode is to be told from another."""


@dataclass(frozen=True, eq=False)
class Example:
    """A view, a good placement of it [groups], and which devices are alike [devices], as
    `likeness_of` says."""

    view: ProblemView
    target: GroupPlacement
    likeness: Int64


def good_placement(
    problem: PlacementProblem, view: ProblemView, evaluations: int
) -> tuple[Score, GroupPlacement]:
    """The best that cuts, baselines and local search find within so many evaluations."""
    budget = Budget(evaluations=evaluations, threads=1)
    try_baselines(problem, budget)
    budget.score(problem, np.unique(cut_placements(view), axis=0), always=True)
    for method, share in ((families, 0.5), (multilevel, 0.6), (local_search, 1.0)):
        whole = evaluations if method is families else budget.left
        part = budget.slice(evaluations=int(share * whole))
        attempt(method.__name__, method, problem, part)
    assert budget.ledger.best is not None, "the baselines were evaluated"
    return budget.ledger.best[0], budget.ledger.best[1]


def likeness_of(problem: PlacementProblem) -> Int64:
    """[devices] the first device that is of the same kind, model, memory and rates."""
    devices = problem.machine.devices
    facts = [
        (d.kind, d.model, int(m), tuple(sorted(d.flops_per_second.items())))
        for d, m in zip(devices, problem.capacities, strict=True)
    ]
    return np.array([facts.index(fact) for fact in facts], dtype=np.int64)


def clone(
    policy: Gdp,
    examples: Sequence[Example],
    *,
    passes: int,
    rate: float = 1e-3,
    batch: int = 4,
    seed: int = 0,
    progress: Callable[[int, float], bool] | None = None,
) -> list[float]:
    """Train the policy to take the examples' targets; the mean loss of each pass, in nats.

    rate       Adam's at the start, linear to a tenth at the end
    progress   called with (pass, loss) after each; False ends it

    Every pass sees every example once, in an order drawn from (seed, pass).
    """
    optimizer = torch.optim.Adam(policy.parameters(), lr=rate)
    losses: list[float] = []
    for number in range(passes):
        for settings in optimizer.param_groups:
            settings["lr"] = rate * (1 - 0.9 * number / max(1, passes - 1))
        order = np.random.default_rng((seed, number)).permutation(len(examples))
        found = []
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch].tolist()
            optimizer.zero_grad()
            for index in chosen:
                loss = imitation_loss(policy, examples[index])
                (loss / len(chosen)).backward()  # type: ignore[no-untyped-call]
                found.append(float(loss.detach()))
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        losses.append(float(np.mean(found)))
        if progress is not None and not progress(number, losses[-1]):
            break
    return losses


def imitation_loss(policy: Gdp, example: Example) -> Tensor:
    """-log pi of the likeliest equal of the target, a mean over groups with a choice: half of it by
    their number, half by their work. Of a policy with modes: of the mixture, as if a graph had
    `INDEPENDENT` groups that decide for themselves."""
    view = example.view
    free = torch.from_numpy(np.flatnonzero(view.free))
    modes, logits = policy.logits(view)
    targets = torch.from_numpy(example.target.astype(np.int64))[free]
    work = torch.from_numpy(view.numbers[view.free, column("work_share")])
    weights = 0.5 / len(free) + 0.5 * work / work.sum().clamp(min=1e-9)
    losses = []
    for of_mode in torch.log_softmax(logits, dim=2):
        logs = of_mode[free].clamp(min=-20.0)  # what is not allowed is never a target
        with torch.no_grad():
            renamed = _likeliest_names(logs, targets, weights, example.likeness)
        taken = logs.gather(1, renamed[targets][:, None]).squeeze(1)
        losses.append(-(weights * taken).sum())
    mixed = torch.log_softmax(modes, 0) - INDEPENDENT * torch.stack(losses)
    return -torch.logsumexp(mixed, 0) / INDEPENDENT


def _likeliest_names(logs: Tensor, targets: Tensor, weights: Tensor, likeness: Int64) -> Tensor:
    """[devices] the device that each one of the target stands for: of its like, such that the
    policy's weighted log-probability is highest."""
    devices = logs.shape[1]
    gains = torch.zeros(devices, devices).index_add_(0, targets, weights[:, None] * logs)
    costs = np.where(likeness[:, None] == likeness, -gains.numpy(), 1e9)
    return torch.from_numpy(linear_sum_assignment(costs)[1].astype(np.int64))


VALIDATION_SEED = 10**6
"""Added to the seed for tasks that nothing is learned from."""
SETTINGS = LearningSettings(
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

    wanted: ExampleSpec = field(default_factory=ExampleSpec)
    options: dict[str, Any] = field(default_factory=dict)
    evaluations: int = 2000
    passes: int = 20
    imitation_rate: float = 1e-3
    trials: int = 400_000
    settings: LearningSettings = SETTINGS
    validation: int = 24


@dataclass(frozen=True)
class PretrainingProgress:
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
    seed: int = 0,
    recipe: Recipe | None = None,
    progress: Callable[[PretrainingProgress], None] | None = None,
) -> dict[str, Any]:
    """Follow the recipe, write the policy to `out`, and return its card.

    folder    of the run: what is there already is not done again
    seconds   of PPO, and as many at most of imitation; None: as the recipe says

    The same seed, recipe, and number of trials give the same policy; with `seconds` the machine
    has a say. Ctrl-C within PPO ends it there. Raises what `learn` and captures raise, and
    `RunMismatchError` for the folder of another seed or recipe.
    """
    recipe = recipe or Recipe()
    run = _PretrainingRun(folder, recipe, seed, seconds, progress or _silent)
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
class _PretrainingRun:
    folder: Path
    recipe: Recipe
    seed: int
    seconds: float | None
    progress: Callable[[PretrainingProgress], None]
    began: float = field(default_factory=time.time)

    @property
    def made_by(self) -> dict[str, Any]:
        """What imitation depends on, as JSON knows it."""
        recipe = asdict(self.recipe)
        kept = ("wanted", "options", "evaluations", "passes", "imitation_rate")
        found: dict[str, Any] = {"seed": self.seed, **{key: recipe[key] for key in kept}}
        return dict(json.loads(json.dumps(found)))

    def tell(self, stage: str, done: int, of: int, text: str, point: Point | None = None) -> None:
        self.progress(PretrainingProgress(stage, done, of, text, point))

    def examples(self, tasks: Sequence[PlacementTask]) -> list[Example]:
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

    def target(
        self, task: PlacementTask, problem: PlacementProblem
    ) -> tuple[NDArray[np.int32] | None, float]:
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

    def learn(self, policy: Gdp, tasks: Sequence[PlacementTask]) -> dict[str, float]:
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

    def validate(self, policy: Gdp, tasks: Sequence[PlacementTask], stage: str) -> dict[str, float]:
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
        tasks: Sequence[PlacementTask],
        losses: list[float],
        imitated: dict[str, float],
        finished: dict[str, float],
        learned: dict[str, float],
    ) -> dict[str, Any]:
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


def _check_held_out(tasks: Sequence[PlacementTask]) -> None:
    seen = [task.name for task in tasks for family in HELD_OUT if family in task.name]
    assert not seen, f"held-out families are in the training set: {seen}"


def _as_gdp(policy: object) -> Gdp:
    assert isinstance(policy, Gdp), "the file was checked to be of gdp"
    return policy


def _geometric(ratios: list[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else float("nan")


def _silent(_progress: PretrainingProgress) -> None:
    pass


def main() -> None:
    recipe = Recipe()
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--trials", type=int, default=recipe.trials, help="of PPO; 0: without it")
    parser.add_argument("--out", type=Path, required=True, help="write the policy (.safetensors)")
    parser.add_argument("--folder", type=Path, required=True, help="keep the run, to go on with it")
    parser.add_argument("--seconds", type=float, help="limit of imitation, and again of PPO")
    parser.add_argument("--graphs", type=int, default=recipe.wanted.random, help="random graphs")
    parser.add_argument("--networks", type=int, default=len(NETWORKS), help="of the zoo")
    parser.add_argument("--passes", type=int, default=recipe.passes, help="of imitation")
    arguments = parser.parse_args()
    wanted = replace(
        recipe.wanted, random=arguments.graphs, networks=NETWORKS[: arguments.networks]
    )
    if not (wanted.random or wanted.networks):
        parser.error("there is nothing to learn from")
    recipe = replace(recipe, wanted=wanted, passes=arguments.passes, trials=arguments.trials)

    card = pretrain(
        arguments.out, folder=arguments.folder, seconds=arguments.seconds, seed=arguments.seed,
        recipe=recipe,
        progress=lambda news: say(f"{news.stage} {news.done} of {news.of} {news.text}"),
    )  # fmt: skip
    tasks, trials = len(card["trained_on"]), card["trials"]
    print(f"wrote {arguments.out}: {tasks} tasks, {trials:,} trials of PPO")
    for stage, means in json.loads(card["validation"]).items():
        print(
            f"after {stage}, on unseen graphs: the likeliest {means['likeliest']:.3f} x what the "
            f"search finds, the best proposed {means['best']:.3f} x"
        )


if __name__ == "__main__":
    main()
