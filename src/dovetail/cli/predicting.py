"""`dovetail predict` applies a trained model to a data set with many workers."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli.arguments import Json, check_outputs
from dovetail.cli.options import Options, OptionsOf
from dovetail.cli.output import results, say, show_json
from dovetail.cli.training import FUNCTION_HELP, open_setup
from dovetail.cli.weights import first_line, load_weights
from dovetail.errors import FileFormatError, UsageError
from dovetail.runtime.files import check_archive, files_only, write_atomically
from dovetail.training import BACKENDS, TrainRequest

EPILOGS = {
    "predict": """\
Examples:

  dovetail train mymodels:digits --out weights.pt

  dovetail predict mymodels:digits weights.pt images.npy --out predictions.npy

  dovetail predict mymodels:digits weights.pt validation --evaluate --metric accuracy

The functions are those of `dovetail train --help`.
"""
}
INPUTS, OUTPUTS = (".npy", ".npz", ".csv"), (".npy", ".npz", ".csv")
OWN = ("dataset", "validation")
"""These words name the data that the function returns beside its model."""
DATA_HELP = (
    "dataset or validation: those that FUNCTION returns; package.module:function that returns a "
    "data set; .npy: the model's input, a row a sample; .npz: the first array is the input, the "
    "others are targets; .csv: a sample a line, all columns are its input"
)


HELPS = (
    ("metrics", "Figure to print beside the loss: accuracy, or package.module:function"),
    ("workers", "Workers that compute side by side"),
    ("batch", "Samples of one call of the model"),
    ("backend", f"Where workers run: {', '.join(BACKENDS)}; simulated computes in this process"),
    ("backend_options", "KEY=VALUE, a setting of the backend, e.g. threads=2 of processes"),
)
"""The options of a training that predicting takes, and their help."""


def predict(
    *,
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help=FUNCTION_HELP)],
    weights: Annotated[Path, typer.Argument(help="Weights that `train --out` wrote as a file")],
    data: Annotated[str, typer.Argument(help=DATA_HELP)],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the outputs, a row a sample: .npy, .csv, or .npz for a model of several"
        ),
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Print the loss and the metrics; DATA needs targets")
    ] = False,
    settings: Annotated[
        Options, OptionsOf(TrainRequest, only=[name for name, _ in HELPS], helps=HELPS)
    ],
    as_json: Json = False,
) -> None:
    """Apply a trained model to a data set with many workers.

    Outputs are in the data set's order, and are what the model itself returns in evaluation mode.
    """
    if out is None and not evaluate:
        raise UsageError("--out", "name a file for the outputs, or give --evaluate")
    if "metrics" in settings and not evaluate:
        raise UsageError("--metric", "goes with --evaluate")
    if out is not None and out.suffix not in OUTPUTS:
        raise UsageError("--out", f"{out} must end in {', '.join(OUTPUTS)}")
    check_outputs(out, inputs=[str(weights), data])
    opened = open_setup(function, settings, {})
    load_weights(opened.request.model, weights)
    import torch

    from dovetail.runtime.functions import call_function, names_function

    # The data set that DATA names.
    dataset: Any
    is_file = data not in OWN and not names_function(data)
    if data in OWN:
        dataset = opened.dataset if data == "dataset" else opened.validation
        if dataset is None:
            raise UsageError("DATA", f"{function} returns no {data} set")
    elif not is_file:
        dataset = call_function(data)
    else:
        path = Path(data)
        if path.suffix not in INPUTS:
            offered = ", ".join((*OWN, "package.module:function", *INPUTS))
            raise UsageError("DATA", f"{data!r} is none of {offered}")
        arrays = _read_csv(path) if path.suffix == ".csv" else _read_arrays(path)
        # Floats are cast to the type of the model's parameters; all else stays as it is.
        first = torch.as_tensor(arrays[0])
        kinds = [p.dtype for p in opened.request.model.parameters() if p.is_floating_point()]
        if first.is_floating_point() and kinds:
            first = first.to(kinds[0])
        dataset = (first, *arrays[1:])
    if is_file and len(dataset) == 1 and evaluate:
        raise UsageError("--evaluate", f"{data} holds no targets; give a .npz file with both")
    request = opened.request
    # A collate function makes batches of the function's own items, which a file does not hold.
    if is_file:
        request = replace(request, collate=None)
    from dovetail.training import predicting

    printed: dict[str, Any] = {"out": None, "shapes": None, "figures": None}
    if out is not None:
        named = _named(predicting.predict(request, dataset))
        _write(named, out)
        printed |= {"out": str(out), "shapes": {key: list(a.shape) for key, a in named.items()}}
        say(f"wrote {out}")
    if evaluate:
        printed["figures"] = figures = predicting.evaluate(request, dataset)
        if not as_json:
            for name, value in figures.items():
                results().write(f"{name}  {value:.6g}\n")
    if as_json:
        show_json(printed)


# --- Files of data ---


def _read_arrays(path: Path) -> list[Any]:
    """The arrays of a .npy or .npz file."""
    import numpy as np

    try:
        with open(path, "rb", opener=files_only) as file:
            is_archive = file.read(2) == b"PK"
        if is_archive:
            check_archive(path)
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            arrays = [found]
        else:
            with found:
                arrays = [found[name] for name in found.files]
    except OSError as error:
        raise FileFormatError(str(path), error.strerror or str(error)) from None
    except FileFormatError:
        raise
    except Exception as error:  # numpy and zipfile raise all kinds for a damaged file
        raise FileFormatError(str(path), f"it holds no arrays: {first_line(error)}") from None
    if not arrays:
        raise FileFormatError(str(path), "it holds no array")
    for array in arrays:
        # What is no array in an archive comes as its bytes.
        if not isinstance(array, np.ndarray):
            raise FileFormatError(str(path), "it holds a file that is no array")
        if array.dtype.kind not in "biuf" or array.ndim == 0:
            raise FileFormatError(str(path), f"it holds {array.dtype} of shape {array.shape}")
    return arrays


def _read_csv(path: Path) -> list[Any]:
    """[lines, columns] the numbers of a CSV file, whose first line may be a head."""
    import numpy as np

    try:
        with open(path, newline="", encoding="utf-8", opener=files_only) as file:
            lines = [line for line in csv.reader(file, strict=True) if line]
    except (OSError, ValueError, csv.Error) as error:
        detail = getattr(error, "strerror", None) or str(error)
        raise FileFormatError(str(path), detail) from None
    if lines and not _are_numbers(lines[0]):
        del lines[0]
    if not lines:
        raise FileFormatError(str(path), "it holds no sample")
    for number, line in enumerate(lines, 1):
        if len(line) != len(lines[0]) or not _are_numbers(line):
            detail = f"sample {number} is not {len(lines[0])} numbers"
            raise FileFormatError(str(path), detail)
    return [np.array(lines, np.float64).reshape(len(lines), -1)]


def _are_numbers(cells: list[str]) -> bool:
    try:
        return bool([float(cell) for cell in cells])
    except ValueError:
        return False


# --- The outputs ---


def _named(output: Any, name: str = "output") -> dict[str, Any]:
    """Name -> array of each tensor of an output: `output`, `output_0`, or `output_KEY`."""
    import torch

    if isinstance(output, dict | tuple):
        pairs = output.items() if isinstance(output, dict) else enumerate(output)
        named: dict[str, Any] = {}
        for key, inner in pairs:
            named |= _named(inner, f"{name}_{key}")
        return named
    # NumPy has no bfloat16; float32 holds each of its values.
    wide = output.float() if output.dtype == torch.bfloat16 else output
    return {name: wide.numpy()}


def _write(named: dict[str, Any], path: Path) -> None:
    """Write arrays by name. Raises `UsageError` if the file's form cannot hold them, and
    `UnwritableError`."""
    import numpy as np

    content = io.BytesIO()
    if path.suffix == ".npz":
        np.savez(content, **named)
        write_atomically(path, content.getvalue())
        return
    if len(named) > 1:
        raise UsageError("--out", f"the model returns {', '.join(named)}; give a .npz file")
    (array,) = named.values()
    if path.suffix == ".npy":
        np.save(content, array, allow_pickle=False)
    else:
        if array.ndim > 2:
            detail = f"the model returns {array.ndim} axes, and a table has two; give a .npy file"
            raise UsageError("--out", detail)
        # A line a sample. The text of a numpy number reads back as the same number of its type.
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows(
            [str(value) for value in row] for row in array.reshape(len(array), -1)
        )
        content.write(lines.getvalue().encode())
    write_atomically(path, content.getvalue())
