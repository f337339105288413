"""Lightning's own `Trainer`: by `RuleStrategy` it starts a second process itself, and a network of
`dt.optimize` trains in it as without."""

import importlib
import importlib.util
import json
import subprocess
import sys

import pytest
import torch

import dovetail as dt
from dovetail.pipeline import optimizing
from dovetail.plans import COMPILED
from dovetail.runtime.torch_versions import replaced_call
from tests.support.own_loops import environment

if not any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")):
    pytest.skip("Lightning is not installed", allow_module_level=True)
pl = importlib.import_module(
    "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
)

SCRIPT = """
import importlib, json, sys
import torch

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl
from dovetail.integrations.lightning import RuleStrategy


def words(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)
        )

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, _):
        self.evaluated = words(self)
        self.log("loss", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        made = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [made], [torch.optim.lr_scheduler.StepLR(made, 1, 0.5)]


rule, folder = sys.argv[1:]
strategies = importlib.import_module(pl.__name__ + ".strategies")
settings = {"process_group_backend": "gloo"}
if rule == "ddp":
    strategy = strategies.DDPStrategy(broadcast_buffers=False, **settings)
else:
    strategy = RuleStrategy(rule, 1 if rule == "sync" else 3, **settings)
draw = torch.Generator().manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(32, 6, generator=draw))
loader = torch.utils.data.DataLoader(data, batch_size=4)
net = Net()  # another one in each process: nothing is seeded
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
)
torch.manual_seed(trainer.global_rank)
for parameter in net.parameters():
    torch.nn.init.normal_(parameter)
trainer.fit(net, loader, loader)
result = {"rank": trainer.global_rank, "end": words(net), "evaluated": net.evaluated}
if trainer.global_rank == 0:
    path = trainer.checkpoint_callback.best_model_path
    twin = Net()
    twin.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    result["saved"] = words(twin)
with open(f"{folder}/{trainer.global_rank}.json", "w") as file:
    json.dump(result, file)
"""


def fit(rule, folder):
    script = folder / "script.py"
    script.write_text(SCRIPT)
    subprocess.run(
        [sys.executable, str(script), rule, str(folder)],
        env=environment(), check=True, timeout=240, capture_output=True,
    )  # fmt: skip
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_sync_gives_the_numbers_of_ddp(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    by_rule, by_ddp = fit("sync", tmp_path / "a"), fit("ddp", tmp_path / "b")
    for one, other in zip(by_rule, by_ddp, strict=True):
        assert one["end"] == pytest.approx(other["end"], rel=1e-5, abs=1e-7)


def test_all_processes_evaluate_save_and_end_with_the_center(tmp_path):
    first, second = fit("adag-agn", tmp_path)
    assert first["evaluated"] == second["evaluated"] == first["saved"]
    assert first["end"] == second["end"]


class Classifier(pl.LightningModule):
    """A user's module: clipped by the trainer, under a schedule, with a smaller last batch."""

    def __init__(self, net):
        super().__init__()
        self.net, self.losses = net, []

    def training_step(self, batch, _):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        made = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [made], [torch.optim.lr_scheduler.CosineAnnealingLR(made, 3)]


def test_an_optimized_network_trains_as_without(tmp_path, monkeypatch):
    plain_compile, calls = torch.compile, []

    def compiled(call):
        calls.append(1)
        return plain_compile(call, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(optimizing, "cache_folder", lambda: tmp_path)
    decision = optimizing.CallDecision(COMPILED, replaced_call)
    monkeypatch.setattr(optimizing.OptimizedCalls, "raced", lambda *_: decision)
    draw = torch.Generator().manual_seed(0)
    words, classes = torch.randn(26, 6, generator=draw), torch.randint(0, 3, (26,), generator=draw)
    data = torch.utils.data.TensorDataset(words, classes)
    ends, losses = [], []
    for wrap in (lambda net: net, dt.optimize):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
        )
        module = Classifier(wrap(net))
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=3, gradient_clip_val=0.5, logger=False,
            enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path / str(len(ends)),
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        path = trainer.checkpoint_callback.best_model_path
        saved = torch.load(path, weights_only=False)["state_dict"]
        assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
        ends.append(saved)
        losses.append(module.losses)
    assert calls
    assert len(losses[0]) == 21
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value)
