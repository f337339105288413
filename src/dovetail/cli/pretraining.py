"""`dovetail learn pretrain`: the recipe of the shipped policy, as one command."""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.arguments import Json, check_outputs
from dovetail.cli.output import progress_bar, say, show, show_json
from dovetail.errors import UsageError

if TYPE_CHECKING:
    from dovetail.placers.learned.pretraining import Progress, Recipe
    from dovetail.placers.learned.records import Point

KEYS = ("trained_on", "held_out", "seed", "updates", "trials", "seconds", "versions")


def pretrain(  # noqa: PLR0913  one argument an option
    out: Annotated[Path, typer.Option(help="Write the policy (.safetensors)")],
    trials: Annotated[
        int | None, typer.Option(min=0, help="Of PPO", show_default="the recipe's")
    ] = None,
    budget: Annotated[
        str, typer.Option(help="60s, 5m: of imitation, and again of PPO, at most")
    ] = "",
    graphs: Annotated[
        int | None, typer.Option(min=0, help="Random graphs", show_default="the recipe's")
    ] = None,
    networks: Annotated[
        bool, typer.Option("--networks/--no-networks", help="Networks of the zoo as well")
    ] = True,
    passes: Annotated[
        int | None, typer.Option(min=0, help="Of imitation", show_default="the recipe's")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    folder: Annotated[
        Path | None, typer.Option(help="Keep graphs, targets and the run there, to resume it")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --folder")] = False,
    curves: Annotated[Path | None, typer.Option(help="Write PPO's curves (CSV)")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder of event files")] = None,
    as_json: Json = False,
) -> None:
    """Train a gdp policy on random graphs and the zoo, the held-out families left out.

    It imitates what a search finds, then learns by PPO. Ctrl-C within PPO keeps the policy.
    """
    from dovetail.cli.learning_run import Events
    from dovetail.cli.training_setup import check_folder, parse_seconds
    from dovetail.placers.learned.pretraining import pretrain as follow

    check_outputs(out, curves)
    seconds = parse_seconds("--budget", budget) if budget else None
    _check_folder(folder, resume)
    check_folder(tensorboard)
    recipe = _recipe(graphs, networks, passes)
    points: list[Point] = []
    with ExitStack() as stack:
        events = None if tensorboard is None else stack.enter_context(Events(tensorboard))
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bar = stack.enter_context(progress_bar())

        def heard(news: "Progress") -> None:
            share = news.done / news.of if news.of else 0.0
            point = news.point
            bar(f"{news.stage} {news.text}", share, None if point is None else point.best)
            if point is not None:
                points.append(point)
                if events is not None:
                    events.add(point)
            elif news.done == news.of:
                say(f"{news.stage}: {news.done} {news.text}")

        card = follow(
            out, folder=where, seconds=seconds, trials=trials, seed=seed, recipe=recipe,
            progress=heard,
        )  # fmt: skip
    say(f"wrote {out}")
    if curves is not None:
        from dovetail.placers.learned.curves import save_points

        save_points(points, curves)
        say(f"wrote {curves}")
    _tell(card, out, as_json)


def _recipe(graphs: int | None, networks: bool, passes: int | None) -> "Recipe":
    from dataclasses import replace

    from dovetail.placers.learned.pretraining import Recipe

    recipe = Recipe()
    wanted = recipe.wanted
    if graphs is not None:
        wanted = replace(wanted, random=graphs)
    if not networks:
        wanted = replace(wanted, networks=())
    if not (wanted.random or wanted.networks):
        raise UsageError("graphs", "there is nothing to learn from; use 1 or more, or --networks")
    return replace(recipe, wanted=wanted, passes=recipe.passes if passes is None else passes)


def _check_folder(folder: Path | None, resume: bool) -> None:
    from dovetail.cli.training_setup import check_folder

    check_folder(folder)
    if folder is None:
        if resume:
            raise UsageError("resume", "needs the folder of the run")
        return
    held = folder.is_dir() and any(folder.iterdir())
    if held and not resume:
        raise UsageError("folder", f"{folder} is not empty; resume it, or give another folder")
    if resume and not held:
        raise UsageError("resume", f"{folder} holds no run")


def _tell(card: dict[str, Any], out: Path, as_json: bool) -> None:
    found: dict[str, Any] = {key: card.get(key) for key in KEYS}
    found["validation"] = json.loads(card["validation"])
    found["policy"] = str(out)
    if as_json:
        show_json(found)
        return
    from rich.table import Table

    head = ("after", "likeliest", "best proposed")
    table = Table(*head, title="Zero-shot against the search, unseen")
    for stage, means in found["validation"].items():
        table.add_row(stage, f"{means['likeliest']:.3f} x", f"{means['best']:.3f} x")
    show(table)
    say(f"{len(card['trained_on'])} tasks, {card['trials']:,} trials of PPO")
