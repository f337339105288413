"""`RuleStrategy` in Lightning's own `Trainer`, which starts the second process itself."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.support.own_loops import environment

if not any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")):
    pytest.skip("Lightning is not installed", allow_module_level=True)

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
