"""The callbacks of transformers' own `Trainer`, with a tiny random GPT-2: `PlanCallback` in this
process, `RuleCallback` on two ranks."""

import json

import pytest
import torch

from dovetail.errors import UsageError
from dovetail.machine import parse_machine
from dovetail.pipeline import training_steps
from dovetail.pipeline.sources import in_order, with_threads
from tests.support.forked_ranks import ForkedRanks
from tests.support.own_loops import program

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def a_trainer(folder, kind=transformers.Trainer, **settings):
    torch.manual_seed(0)
    size = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    still = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = transformers.GPT2Config(**size, **still, bos_token_id=0, eos_token_id=0)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (28, 8), generator=draw)
    data = [{"input_ids": each, "labels": each} for each in tokens]
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=4, num_train_epochs=3,
        gradient_accumulation_steps=2, max_grad_norm=0.5, learning_rate=0.01, warmup_steps=2,
        lr_scheduler_type="cosine", eval_strategy="epoch", save_strategy="no", logging_steps=1,
        report_to=[], disable_tqdm=True, **settings,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    return kind(model, args, train_dataset=data, eval_dataset=data[:8])


def test_a_plan_under_the_trainers_own_loop_trains_as_it_does(tmp_path, monkeypatch):
    from dovetail.integrations.transformers import PlanCallback

    machine = with_threads(parse_machine("here/cpu"), torch.get_num_threads())
    made = []

    def find_plan(request, _progress):
        made.append(request)
        return in_order(request.step.graph, machine)

    monkeypatch.setattr(training_steps, "find_plan", find_plan)
    plain, planned = a_trainer(tmp_path), a_trainer(tmp_path)
    callback = PlanCallback(planned, budget="1s")
    planned.add_callback(callback)
    plain.train()
    planned.train()
    assert made and "a plan on" in callback.step.describe()
    for name, parameter in plain.model.named_parameters():
        own = dict(planned.model.named_parameters())[name]
        torch.testing.assert_close(own, parameter, rtol=1e-5, atol=1e-6)
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        of_both = [
            [line[key] for line in trainer.state.log_history if key in line]
            for trainer in (planned, plain)
        ]
        assert of_both[0] and of_both[0] == pytest.approx(of_both[1], rel=1e-5)


def test_a_trainer_that_computes_its_own_loss_is_refused(tmp_path):
    from dovetail.integrations.transformers import PlanCallback

    class Own(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    for trainer in (a_trainer(tmp_path, Own), a_trainer(tmp_path, label_smoothing_factor=0.1)):
        with pytest.raises(UsageError, match="has a loss of its own"):
            PlanCallback(trainer)
    patched = a_trainer(tmp_path)
    patched.compute_loss = lambda *_, **__: None
    with pytest.raises(UsageError, match="has a loss of its own"):
        PlanCallback(patched)
    trainer = a_trainer(tmp_path)
    trainer.model_init = lambda: trainer.model
    with pytest.raises(UsageError, match=r"makes its model in train"):
        PlanCallback(trainer)
    with pytest.raises(UsageError, match="half precision"):
        PlanCallback(a_trainer(tmp_path, bf16=True))


BODY = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from safetensors.torch import load_file
from dovetail.integrations.transformers import RuleCallback

def words(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])

class Watch(TrainerCallback):
    def on_evaluate(self, args, state, control, model=None, **kwargs):
        self.evaluated = words(model).tolist()

def fit(name, rule=None, window=None, **settings):
    torch.manual_seed(rank)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    ))
    draw = torch.Generator().manual_seed(0)
    data = [{"input_ids": t, "labels": t} for t in torch.randint(0, 32, (28, 8), generator=draw)]
    args = TrainingArguments(
        FOLDER + name, use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=2,
        num_train_epochs=2, max_grad_norm=0, learning_rate=0.01, eval_strategy="epoch",
        save_strategy="epoch", logging_strategy="no", report_to=[], disable_tqdm=True, **settings,
    )
    watch = Watch()
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:8], callbacks=[watch])
    if rule is not None:
        trainer.add_callback(RuleCallback(trainer, rule, window))
    trainer.train()
    log = trainer.state.log_history
    steps = trainer.state.global_step
    saved = load_file(f"{FOLDER}{name}/checkpoint-{steps}/model.safetensors")
    twin = GPT2LMHeadModel(model.config)
    twin.load_state_dict(saved, strict=False)
    best = ""
    if args.load_best_model_at_end:
        best = trainer.state.best_model_checkpoint
        twin.load_state_dict(load_file(best + "/model.safetensors"), strict=False)
    return {
        "end": words(model).tolist(), "evaluated": watch.evaluated, "saved": words(twin).tolist(),
        "losses": [line["eval_loss"] for line in log if "eval_loss" in line], "best": best,
    }
"""


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = f"{tmp_path_factory.mktemp('transformers')}/"
    cases = """
print(json.dumps({
    "ddp": fit("ddp"), "sync": fit("sync", "sync", 1), "agn": fit("agn", "adag-agn", 3),
    "elastic": fit("elastic", "aeasgd", 2),
    "best": fit("best", "agn", 3, load_best_model_at_end=True, metric_for_best_model="loss",
                greater_is_better=True),
}))
"""
    with ForkedRanks(2, program(f"FOLDER = {json.dumps(folder)}\n{BODY}{cases}")) as ranks:
        return ranks.results()


def test_sync_gives_the_numbers_of_ddp(fitted):
    for result in fitted:
        assert result["sync"]["end"] == pytest.approx(result["ddp"]["end"], rel=1e-5, abs=1e-7)
        assert result["sync"]["losses"] == pytest.approx(result["ddp"]["losses"], rel=1e-5)


@pytest.mark.parametrize("case", ["agn", "elastic"])
def test_all_ranks_evaluate_save_and_end_with_the_center(fitted, case):
    first, second = (result[case] for result in fitted)
    assert first["evaluated"] == second["evaluated"] == first["saved"]
    assert first["end"] == second["end"]
    assert first["losses"] == second["losses"]
    assert first["losses"][1] < first["losses"][0]


def test_the_best_model_is_not_lost_at_the_end(fitted):
    """The greatest loss counts as the best, so the best model is the first."""
    for result in fitted:
        assert result["best"]["best"].endswith("checkpoint-7")
        assert result["best"]["end"] == result["best"]["saved"]
        assert result["best"]["end"] != result["best"]["evaluated"]
