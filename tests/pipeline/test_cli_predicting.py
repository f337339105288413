"""`dovetail predict`, in process: its files, its figures, and every wrong input."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.support import trained_models

MODEL = "tests.support.trained_models:quadrants"
HERE = ("--backend", "simulated")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights that differ from those that the function's own model has."""
    model = trained_models.network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save(model.state_dict(), path)
    return path


@pytest.fixture
def predict(dovetail, weights):
    """predict(data, *options) -> (exit status, standard output, standard error)."""
    return lambda data, *options: dovetail("predict", MODEL, weights, data, *HERE, *options)


def expected(weights, inputs):
    model = trained_models.network()
    model.load_state_dict(torch.load(weights, weights_only=True))
    with torch.no_grad():
        return model(torch.from_numpy(inputs)).numpy()


def test_help_needs_no_torch():
    code = (
        "import sys; sys.argv = ['dovetail', 'predict', '--help']\n"
        "import dovetail.cli\n"
        "try: dovetail.cli.main()\n"
        "except SystemExit: print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.strip().endswith("False False")


def test_weights_are_read_from_safetensors(dovetail, weights, tmp_path):
    from safetensors.torch import save_file

    file, data = tmp_path / "weights.safetensors", trained_models.arrays(50, 2)[0]
    save_file(torch.load(weights, weights_only=True), file)
    np.save(tmp_path / "x.npy", data)
    out = tmp_path / "y.npy"
    status, _, err = dovetail("predict", MODEL, file, tmp_path / "x.npy", *HERE, "--out", out)
    assert status == 0, err
    assert np.allclose(np.load(out), expected(weights, data), atol=1e-6)
    file.write_bytes(file.read_bytes()[:100])
    status, _, err = dovetail("predict", MODEL, file, tmp_path / "x.npy", *HERE, "--out", out)
    assert status == 2 and "weights.safetensors: it holds no weights" in err


def test_figures_of_the_users_own_are_printed(predict):
    own = "tests.support.trained_models:share_of_first_class"
    status, out, err = predict("validation", "--evaluate", "--metric", own, "--json")
    assert status == 0, err
    assert set(json.loads(out)["figures"]) == {"loss", "share_of_first_class"}


def test_data_and_outputs_are_of_every_form(predict, weights, tmp_path):
    inputs, labels = trained_models.arrays(50, 2)
    rows = expected(weights, inputs)
    np.save(tmp_path / "x.npy", inputs.astype(np.float64))  # the model's own type is float32
    np.savez(tmp_path / "x.npz", x=inputs, y=labels)
    lines = [",".join(map(str, row)) for row in inputs.tolist()]
    (tmp_path / "x.csv").write_text("\n".join(lines))
    (tmp_path / "headed.csv").write_text("\n".join(["a,b,c,d", *lines]))
    for name in ("x.npy", "x.npz", "x.csv", "headed.csv"):
        out = tmp_path / f"from-{name}.npy"
        status, _, err = predict(tmp_path / name, "--out", out)
        assert status == 0, err
        assert np.allclose(np.load(out), rows, atol=1e-6)
    for suffix in (".csv", ".npz"):
        out = tmp_path / f"y{suffix}"
        assert predict(tmp_path / "x.npy", "--out", out)[0] == 0
        found = np.loadtxt(out, delimiter=",") if suffix == ".csv" else np.load(out)["output"]
        assert np.allclose(found, rows, atol=1e-6)


def test_the_functions_own_data_and_those_of_another_function(predict, weights, tmp_path):
    out = tmp_path / "y.npy"
    shapes = {}
    for data in ("dataset", "validation", "tests.support.trained_models:arrays"):
        status, printed, err = predict(data, "--out", out, "--json")
        assert status == 0, err
        shapes[data] = json.loads(printed)["shapes"]["output"]
    assert list(shapes.values()) == [[240, 4], [80, 4], [240, 4]]
    assert np.allclose(np.load(out), expected(weights, trained_models.arrays()[0]), atol=1e-6)


def test_figures_are_printed(predict, weights):
    options = ("--evaluate", "--metric", "accuracy")
    figures = json.loads(predict("validation", *options, "--json")[1])["figures"]
    inputs, labels = trained_models.arrays(80, 1)
    rows = expected(weights, inputs)
    assert figures["accuracy"] == pytest.approx((rows.argmax(1) == labels).mean())
    status, out, _ = predict("validation", *options)
    assert status == 0 and out.split()[::2] == ["loss", "accuracy"]


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ("validation", (), "name a file for the outputs, or give --evaluate"),
        ("validation", ("--out", "y.txt"), "must end in .npy, .npz, .csv"),
        ("validation", ("--out", "y.npy", "--metric", "accuracy"), "goes with --evaluate"),
        ("validation", ("--out", "y.npy", "--backend", "clouds"), "there is no 'clouds'"),
        ("holdout", ("--evaluate",), "is none of dataset, validation"),
        ("missing.npy", ("--evaluate",), "No such file"),
        ("broken.npy", ("--evaluate",), "it holds no arrays"),
        ("missing.csv", ("--evaluate",), "No such file"),
        ("ragged.csv", ("--evaluate",), "sample 2 is not 2 numbers"),
        ("own.npy", ("--out", "own.npy"), "it is read as well"),
        ("own.npy", ("--evaluate",), "holds no targets"),
        ("words.npy", ("--evaluate",), "it holds <U3"),
        ("head.csv", ("--out", "y.npy"), "it holds no sample"),
        ("empty.csv", ("--out", "y.npy"), "it holds no sample"),
    ],
)
def test_what_cannot_be_predicted_ends_in_one_line(
    predict, tmp_path, monkeypatch, data, options, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.npy").write_text("no array")
    (tmp_path / "ragged.csv").write_text("1,2\n3\n")
    (tmp_path / "head.csv").write_text("a,b\n")
    (tmp_path / "empty.csv").write_text("")
    np.save(tmp_path / "words.npy", np.array(["one", "two"]))
    np.save(tmp_path / "own.npy", np.zeros((2, 4), np.float32))
    status, _, err = predict(data, *options)
    assert status == 2
    assert words in err and "Traceback" not in err


def test_weights_of_another_model_are_refused_by_the_files_name(dovetail, tmp_path):
    other, text = tmp_path / "other.pt", tmp_path / "text.pt"
    torch.save(torch.nn.Linear(2, 2).state_dict(), other)
    text.write_text("no weights")
    for path, words in ((other, "it does not fit the model"), (text, "it is no zip archive"),
                        (tmp_path / "none.pt", "No such file")):  # fmt: skip
        status, _, err = dovetail("predict", MODEL, path, "validation", "--evaluate", *HERE)
        assert status == 2 and words in err and str(path) in err


def test_a_function_without_validation_set_has_none(dovetail, weights):
    function = "tests.support.trained_models:without_validation"
    status, _, err = dovetail("predict", function, weights, "validation", "--evaluate", *HERE)
    assert status == 2 and "returns no validation set" in err
