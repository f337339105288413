"""Fits the cost model of kernels to measured ops, and judges it on cards that were left out.

    git clone https://github.com/sitar-lab/NeuSight
    python benchmarks/predictor/fit.py NeuSight --write

NeuSight (S. Lee et al., ASPLOS 2025, MIT licence) holds calls of single ops and whole steps of
networks, measured in float32 on GPUs from P4 to H100. Each of seven cards is left out in turn: the
coefficients are fitted to single ops of the other six, and predict its ops and its steps. AMD's
MI100 to MI250 are in no fit. No step is ever fitted to, but for one number,
which makes intervals of steps out of those of ops; it comes from other cards' steps. Cards are
dovetail's own presets. --write fits all seven, and writes the table that dovetail comes with.
"""

import json
import math
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import fill, host, keep_json, parser_of, read_csv, say, table

import dovetail as dt
from dovetail.costs import analytic_costs
from dovetail.costs.kernels import (
    MOVES_NOTHING,
    TABLE,
    KernelModel,
    ProductLaw,
    is_older,
    product_seconds,
    step_spread,
)
from dovetail.graph import Graph, Phase
from dovetail.machine import Device, parse_machine

HERE = Path(__file__).resolve().parent
CARDS = {
    "Tesla P4": "p4", "Tesla P100-PCIE-16GB": "p100", "Tesla V100-PCIE-32GB": "v100-pcie",
    "Tesla T4": "t4", "NVIDIA A100-PCIE-40GB": "a100-40gb-pcie",
    "NVIDIA A100 80GB PCIe": "a100-pcie", "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA L4": "l4", "NVIDIA H100 80GB HBM3": "h100", "AMD Instinct MI100": "mi100",
    "AMD Instinct MI210": "mi210", "AMD Instinct MI250": "mi250",
}  # fmt: skip
FITTED = ("p4", "p100", "v100-pcie", "t4", "a100-40gb-pcie", "l4", "h100")
FAMILY = {"a100-pcie": "a100-40gb-pcie", "a100-40gb": "a100-40gb-pcie"}
"""Cards that are left out together."""
TENSORS = {
    "pointwise": {
        "add": 3, "addu": 2, "mul": 3, "mulu": 2, "div": 3, "divu": 2, "pow": 3, "powu": 2,
        "gelu": 2, "relu": 2, "tanh": 2,
    },
    "softmax": {"softmax": 2},
    "normalisation": {"ln": 2},
}  # fmt: skip
"""Class -> measured op -> how many tensors of [B, H] it reads and writes."""
LAWS = {"product": ("linear", "bmm"), "convolution": ("conv",)}
START = ProductLaw(55.0, 1.6, 1.1, 2.0, 0.8, 22.3, 0.683)
"""Where a fit begins. The last two are a line through watts over peak of P100, V100, A100 and H100
in their SXM form, by the logarithms of their nanometres."""
OF_SHEETS = {"product": ("picojoules", "shrink"), "convolution": ()}
"""What is not fitted: with it, cards of little power would decide about all others. Convolutions by
Winograd's algorithm take fewer FLOPs than are counted, so theirs are fitted."""
PRIOR = 3.0
"""How much the fit is held to `START`: where the cards do not tell, they should not guess."""
MOST_CALLS = 800
"""Of each op and card that are fitted to."""
LEAST_SECONDS = 200e-6
"""A measured call includes the host's issue, 20 to 50 us of it, which a step hides. So only calls
are counted that take this long at peak rates."""
SEED = 0
UNFITTED_SPREADS = {
    "attention": 0.5, "gather": 0.5, "reduction": 0.35, "update": 0.35, "recurrent": 0.7,
    "tensor cores": 0.5,
}  # fmt: skip
"""Assumed: no measured calls are at hand. They are wider than those of the fitted classes."""
UNFITTED_SHARES = {"attention": (0.6, 0.6), "gather": (0.6, 0.6), "recurrent": (0.6, 0.6)}


@dataclass(frozen=True, eq=False)
class Calls:
    """Measured calls of one op on one card.

    sizes     [4, calls] batches, rows, columns, inner axis; of ops that are bound by memory
              [1, calls] the bytes that they access
    """

    op: str
    card: str
    seconds: np.ndarray
    sizes: np.ndarray

    @property
    def family(self) -> str:
        return FAMILY.get(self.card, self.card)


def device_of(card: str) -> Device:
    return parse_machine(f"1 x {card} + xeon").devices[0]


def _column(rows: Sequence[Mapping[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows])


def calls_of(data: Path, op: str, tensors: int = 0) -> list[Calls]:
    """The calls of an op, one record a card: those to fit to of `FITTED`, the test set of others.

    tensors   that an op that is bound by memory reads and writes
    """
    found = []
    test = {"ln": "ln", "softmax": "softmax"}.get(op, "elem" if tensors else op)
    tested = data / "dataset" / "test" / f"{test}.csv"
    tests = [row for row in read_csv(tested) if row["OPName"] == op] if tested.exists() else []
    for name, card in CARDS.items():
        path = next((data / "dataset" / "train" / "collect" / op).glob(f"*/{name}.csv"), None)
        rows = read_csv(path) if path else [row for row in tests if row["Device"] == name]
        if not rows:
            continue
        device = device_of(card)
        if tensors:
            sizes = 4.0 * tensors * _column(rows, "B")[None] * _column(rows, "H")
            ideal = sizes[0] / device.bandwidth_bytes_per_second
        else:
            sizes = _windows(rows) if op == "conv" else np.stack([_column(rows, n) for n in "BMNK"])
            ideal = 2 * np.prod(sizes, axis=0) / device.rate("float32")
        long = ideal >= LEAST_SECONDS
        if long.any():
            found.append(Calls(op, card, 1e-3 * _column(rows, "Latency")[long], sizes[:, long]))
    return found


def _windows(rows: Sequence[Mapping[str, str]]) -> np.ndarray:
    """[4, calls] the sizes of the products that convolutions are."""
    kernel = _column(rows, "Kernel_Szie")
    side = _column(rows, "Input_Size") + 2 * _column(rows, "Padding") - kernel
    side = np.floor(side / _column(rows, "Stride")) + 1
    windows, filters = _column(rows, "B") * side**2, _column(rows, "Output_Channel")
    return np.stack(
        [np.ones(len(rows)), windows, filters, _column(rows, "Input_Channel") * kernel**2]
    )


def fit_law(calls: Sequence[Calls], fixed: Sequence[str]) -> ProductLaw:
    """The coefficients of the least robust error of logarithms, `fixed` as in `START`."""
    chosen = []
    for of in calls:
        picked = np.random.default_rng(SEED).permutation(len(of.seconds))[:MOST_CALLS]
        chosen.append((device_of(of.card), of.sizes[:, picked], of.seconds[picked]))
    count = sum(len(seconds) for _, _, seconds in chosen)
    names = [field.name for field in fields(ProductLaw) if field.name not in fixed]
    start = np.log([getattr(START, name) for name in names])

    def errors(x: np.ndarray) -> np.ndarray:
        values = np.exp(np.clip(x, -30, 30)).tolist()
        law = replace(START, **dict(zip(names, values, strict=True)))
        of_calls = [np.log(product_seconds(law, d, sizes) / s) for d, sizes, s in chosen]
        return np.concatenate([*of_calls, PRIOR * math.sqrt(count) / 10 * (x - start)])

    found = least_squares(errors, start, loss="soft_l1", f_scale=0.1, max_nfev=60).x
    rounded = [float(f"{value:.4g}") for value in np.exp(found)]
    return replace(START, **dict(zip(names, rounded, strict=True)))


def fit_shares(calls: Sequence[Calls]) -> tuple[float, float]:
    """The shares of the bandwidth that the median older and newer card reaches in the median call.
    There must be cards of both ages."""
    of_card: dict[str, list[np.ndarray]] = {}
    for of in calls:
        reached = of.sizes[0] / of.seconds / device_of(of.card).bandwidth_bytes_per_second
        of_card.setdefault(of.card, []).append(reached)
    medians = {card: float(np.median(np.concatenate(of))) for card, of in of_card.items()}
    older, newer = (
        float(np.median([m for card, m in medians.items() if is_older(device_of(card)) == is_old]))
        for is_old in (True, False)
    )
    return float(f"{older:.3g}"), float(f"{newer:.3g}")


def predict(model: KernelModel, name: str, calls: Calls) -> np.ndarray:
    device = device_of(calls.card)
    if name in model.laws:
        return product_seconds(model.laws[name], device, calls.sizes) + device.op_overhead_seconds
    share = model.shares[name][0 if is_older(device) else 1]
    reached = share * device.bandwidth_bytes_per_second
    return calls.sizes[0] / reached + device.op_overhead_seconds


def fit(all_calls: Mapping[str, Sequence[Calls]], left_out: str = "") -> KernelModel:
    """The model without a card; its spreads are still to come."""
    kept = {
        name: [c for c in calls if c.family in FITTED and c.family != left_out]
        for name, calls in all_calls.items()
    }
    laws = {name: fit_law(kept[name], OF_SHEETS[name]) for name in LAWS}
    shares = {name: fit_shares(kept[name]) for name in TENSORS}
    return KernelModel(laws, {**UNFITTED_SHARES, **shares}, {}, 1.0)


def quantile(values: Iterable[float], share: float = 0.8) -> float:
    return float(np.quantile(np.array(list(values)), share))


# --- Steps ---


@dataclass(frozen=True)
class MeasuredStep:
    """A whole step that was measured.

    sizes     network, "inf" or "train", tokens, batch
    backward_seconds   of a training step
    """

    sizes: tuple[str, ...]
    card: str
    seconds: float
    backward_seconds: float

    @property
    def family(self) -> str:
        return FAMILY.get(self.card, self.card)


def steps_of(data: Path) -> list[MeasuredStep]:
    """The steps of one device that were neither fused nor split."""
    found = []
    for name, card in CARDS.items():
        for path in sorted((data.parent / "label" / name.replace(" ", "_")).glob("*.json")):
            sizes = tuple(path.stem.split("-"))
            if len(sizes) == 4 and (data / "DLmodel_configs" / f"{sizes[0]}.json").exists():
                row = json.loads(path.read_text("utf-8"))
                seconds, backward = 1e-3 * row["e2e_latency"], 1e-3 * row["bwall_latency"]
                found.append(MeasuredStep(sizes, card, seconds, backward))
    return found


def graph_of(data: Path, sizes: tuple[str, ...]) -> Graph:
    """The captured step, of the class of network that NeuSight measured. Raises `ModelError`."""
    import torch
    import transformers

    class Loss(torch.nn.Module):
        def __init__(self, network: torch.nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            made = self.network(ids)
            logits = made["prediction_logits" if "prediction_logits" in made else "logits"]
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    name, kind, tokens, batch = sizes
    raw = json.loads((data / "DLmodel_configs" / f"{name}.json").read_text("utf-8"))
    config = transformers.AutoConfig.for_model(**raw)
    config._attn_implementation, config.use_cache = "eager", False
    made = {
        "bert": transformers.BertForPreTraining if kind == "train"
        else transformers.BertForSequenceClassification,
    }.get(raw["model_type"]) or getattr(transformers, raw["architectures"][0])  # fmt: skip
    with torch.device("meta"):
        network = made(config)
        ids = torch.zeros(int(batch), int(tokens), dtype=torch.long)
    if kind == "train":
        return dt.capture(Loss(network.train()), ids, train="sgd:lr=1e-3").graph
    return dt.capture(network.eval(), ids).graph


@dataclass(frozen=True)
class StepError:
    """A measured step beside its prediction.

    spread     the mean of its kernels' spreads, weighted by their seconds
    backward   the error of a training step's backward alone
    roofline   the error of peaks and bandwidth by the data sheet alone
    """

    step: MeasuredStep
    predicted: float
    spread: float
    backward: float
    roofline: float

    @property
    def error(self) -> float:
        return self.predicted / self.step.seconds - 1

    @property
    def distance(self) -> float:
        """The logarithm of the error, in spreads."""
        return abs(math.log(self.predicted / self.step.seconds)) / self.spread


def step_error(step: MeasuredStep, graph: Graph, model: KernelModel) -> StepError:
    """The error of a step. Its update is left out, as it was not measured."""
    machine, phases = parse_machine(f"1 x {step.card} + xeon"), np.array(graph.phases)
    bare = replace(machine, devices=tuple(replace(d, chip=None) for d in machine.devices))
    sheet = analytic_costs(graph, bare).compute_seconds[phases != Phase.UPDATE, 0].sum()
    seconds = analytic_costs(graph, machine, model).compute_seconds
    seconds = np.where(phases[:, None] == Phase.UPDATE, 0.0, seconds)
    spread = step_spread(graph, machine, np.zeros(len(graph), np.intp), seconds, model)
    seconds = seconds[:, 0]
    backward = float(seconds[phases == Phase.BACKWARD].sum())
    off = backward / step.backward_seconds - 1 if step.backward_seconds else 0.0
    roofline = float(sheet) / step.seconds - 1
    return StepError(step, float(seconds.sum()), spread, off, roofline)


# --- Tables ---


def with_spreads(
    model: KernelModel, held_out: Mapping[str, Mapping[str, np.ndarray]], left_out: str = ""
) -> KernelModel:
    """The model with the spreads of errors that were held out, those of one card left out."""
    spreads = {
        name: [abs(e) for card, e in of_card.items() if card in FITTED and card != left_out]
        for name, of_card in held_out.items()
    }
    fitted = {name: round(quantile(np.concatenate(of)), 3) for name, of in spreads.items()}
    return replace(model, spreads={MOVES_NOTHING: 0.0, **UNFITTED_SPREADS, **fitted})


def percent(value: float | np.floating, form: str = ".1f") -> str:
    return f"{100 * value:{form}} %"


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = parser_of(__doc__, write=False)
    parser.add_argument("neusight", type=Path, help="a clone of NeuSight")
    given = parser.parse_args()
    data, began = given.neusight / "scripts" / "asplos" / "data", time.monotonic()
    all_calls = {name: [c for op in ops for c in calls_of(data, op)] for name, ops in LAWS.items()}
    for name, ops in TENSORS.items():
        all_calls[name] = [c for op, count in ops.items() for c in calls_of(data, op, count)]
    bare = {card: fit(all_calls, card) for card in ("", *FITTED)}
    say(f"{len(bare)} fits in {time.monotonic() - began:.0f} s")

    # [class][card] the logarithms of predicted over measured.
    found: dict[str, dict[str, list[np.ndarray]]] = {name: {} for name in all_calls}
    for name, calls in all_calls.items():
        for of in calls:
            left_out = of.family if of.family in FITTED else ""
            error = np.log(predict(bare[left_out], name, of) / of.seconds)
            found[name].setdefault(left_out or of.card, []).append(error)
    held_out = {
        name: {card: np.concatenate(errors) for card, errors in of_card.items()}
        for name, of_card in found.items()
    }
    ops = []
    for name, of_card in held_out.items():
        for card, error in of_card.items():
            off = np.expm1(error)
            ops.append([name, card, f"{len(off):,}", percent(np.median(abs(off))),
                        percent(np.median(off), "+.1f")])  # fmt: skip
        everything = np.expm1(np.concatenate(list(of_card.values())))
        ops.append([name, "all", f"{len(everything):,}", percent(np.median(abs(everything))),
                    percent(np.median(everything), "+.1f")])  # fmt: skip

    models = {card: with_spreads(model, held_out, card) for card, model in bare.items()}
    graphs: dict[tuple[str, ...], Graph | None] = {}
    errors = []
    for step in steps_of(data):
        if step.sizes not in graphs:
            try:
                graphs[step.sizes] = graph_of(data, step.sizes)
            except dt.DovetailError as error:
                graphs[step.sizes] = None
                say(f"{' '.join(step.sizes)} is left out: {str(error).splitlines()[0]}")
        graph = graphs[step.sizes]
        if graph is not None:
            left_out = step.family if step.family in FITTED else ""
            errors.append(step_error(step, graph, models[left_out]))
    rows: list[list[str]] = []
    inside: list[bool] = []
    for each in errors:
        step = each.step
        others = [e.distance for e in errors if e.step.family != step.family]
        off = math.exp(each.spread * quantile(others))
        inside.append(1 / off <= step.seconds / each.predicted <= off)
        low, high = 1e3 * each.predicted / off, 1e3 * each.predicted * off
        name, kind, tokens, batch = step.sizes
        rows.append([
            f"{name} {batch} x {tokens}", kind, step.card, f"{1e3 * step.seconds:.0f}",
            f"{1e3 * each.predicted:.0f}", f"{low:.0f} to {high:.0f}",
            percent(each.error, "+.1f"), percent(each.backward, "+.1f") if kind == "train" else "",
        ])  # fmt: skip
    groups = []
    for kind in ("inf", "train"):
        for cards, chosen in (
            ("all seven, left out in turn", lambda e: e.step.family in FITTED),
            *((card, lambda e, card=card: e.step.family == card) for card in FITTED),
            ("AMD's, in no fit", lambda e: e.step.family not in FITTED),
        ):
            members = [(e, i) for e, i in zip(errors, inside, strict=True)
                  if e.step.sizes[1] == kind and chosen(e)]  # fmt: skip
            if not members:
                continue
            chosen_errors = [e for e, _ in members]

            def mean(values: Iterable[float], form: str = ".1f") -> str:
                return percent(np.mean(list(values)), form)

            groups.append([
                f"{kind}, {cards}", f"{len(members)}", mean(abs(e.error) for e in chosen_errors),
                mean((e.error for e in chosen_errors), "+.1f"),
                mean((i for _, i in members), ".0f"),
                mean(abs(e.backward) for e in chosen_errors) if kind == "train" else "",
                mean(abs(e.roofline) for e in chosen_errors),
            ])  # fmt: skip
    texts = {
        "kinds": table(
            ("steps", "count", "mean error", "signed", "within 80 %", "backward alone", "roofline"),
            groups,
        ),
        "ops": table(("class", "card left out", "calls", "median error", "signed"), ops),
        "steps": table(
            ("network", "step", "card", "measured, ms", "predicted", "80 %", "error", "backward"),
            rows,
        ),
    }
    for text in texts.values():
        print(text, end="\n\n")
    say(f"{time.monotonic() - began:.0f} s, {host()}")
    if given.write:
        model = models[""]
        pooling = quantile(e.distance for e in errors if e.step.family in FITTED)
        keep_json(
            TABLE,
            {
                "fitted to": "calls of linear, bmm, conv, pointwise ops, softmax and layer norm in "
                "float32 on P4, P100, V100, T4, A100, L4 and H100 (NeuSight, ASPLOS 2025, MIT "
                "licence), by benchmarks/predictor/fit.py",
                "laws": {name: vars(law) for name, law in model.laws.items()},
                "shares": dict(model.shares),
                "spreads": dict(model.spreads),
                "pooling": round(pooling, 3),
                "unfitted": sorted(UNFITTED_SPREADS),
            },
        )
        for name, text in texts.items():
            fill(HERE / "README.md", name, text)


if __name__ == "__main__":
    main()
