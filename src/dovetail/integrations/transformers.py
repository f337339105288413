"""Trains by a plan, or by an update rule, in the `Trainer` of Hugging Face's transformers.

    trainer = Trainer(model, args, train_dataset=...)
    trainer.add_callback(PlanCallback(trainer))
    trainer.train()                       # a plan computes the loss and its gradients

    trainer.add_callback(RuleCallback(trainer, "adag-agn", window=8))
    trainer.train()                       # torchrun --nproc-per-node 2 script.py

Under torchrun each rank trains its own copy on its part of the batches. `Trainer` wraps the model
in `DistributedDataParallel`, which would average gradients; the callback has it leave them alone.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dovetail.errors import MissingLibraryError, UsageError
from dovetail.pipeline import TrainingStep, training_step
from dovetail.training import Optimizer, Rule

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise MissingLibraryError("transformers", "pip install 'dovetail[transformers]'") from error


def loss_in(outputs: Any) -> Any:
    """The loss in what a model returns, where `Trainer` looks for it."""
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]


class PlanCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Has a plan on this machine's cores compute the loss of a batch, and its gradients, while the
    trainer trains. All else is the trainer's own: sums of batches, clipping, updates, rates,
    evaluations, checkpoints.

    trainer   whose model returns its loss, not yet trained
    options   those of `dovetail.training_step` that are fields of `PlanRequest`, such as `budget`

    `step` says what runs: `callback.step.describe()`. What has no plan trains as it does without
    the callback, and the log says why.

    Raises `UsageError` for a trainer that computes its loss by a function or a method of its own,
    or that trains in several processes, in half precision or on a GPU.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        smooths = trainer.label_smoother is not None or trainer.compute_loss_func is not None
        is_own = getattr(trainer.compute_loss, "__func__", None) is not Trainer.compute_loss
        for is_so, says in (
            (smooths or is_own, "has a loss of its own; a plan takes the model's"),
            (trainer.model_init is not None, "makes its model in train(); give it the model"),
            (trainer.args.world_size > 1, "trains in several processes; a plan is of one"),
            (trainer.args.bf16 or trainer.args.fp16, "trains in half precision"),
            (trainer.args.device.type != "cpu", "trains on a GPU; use_cpu=True trains on the CPU"),
        ):
            if is_so:
                raise UsageError("trainer", says)
        self._trainer, self._compute = trainer, trainer.compute_loss
        self.step: TrainingStep = training_step(
            trainer.model, loss_in, trainer.create_optimizer(), **options
        )
        self._model = trainer.model

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.model is not self._model:
            raise UsageError("trainer", "has another model than when the callback was made")
        vars(self._trainer)["compute_loss"] = self._loss

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        vars(self._trainer).pop("compute_loss", None)

    def _loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if not model.training or return_outputs:
            return self._compute(model, inputs, return_outputs, num_items_in_batch)
        if self._trainer.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        return self.step.loss(**inputs)


class RuleCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Wraps the trainer's optimizer, or the one that it makes by its arguments, in
    `dovetail.Optimizer`, and gives the model the center where it is evaluated or saved, and at the
    end. All ranks evaluate the same center.

    trainer   not yet trained, and not of FSDP or DeepSpeed, whose ranks hold parts of the model
    rule, window   those of `Optimizer`

    Gradients are clipped on each rank, before they are averaged. An evaluation or a checkpoint has
    the center; the optimizer's state in a checkpoint is rank 0's. With `load_best_model_at_end`
    the model is that at the end.
    """

    def __init__(
        self, trainer: Trainer, rule: Rule | str = "adag-agn", window: int | str | None = "auto"
    ) -> None:
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            says = "each rank must hold the whole model; leave FSDP and DeepSpeed out"
            raise UsageError("trainer", says)
        self._trainer = trainer
        self.optimizer = Optimizer(trainer.create_optimizer(), rule, window)
        trainer.optimizer = self.optimizer
        self._centered = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wrapped = self._trainer.model_wrapped
        if isinstance(wrapped, DistributedDataParallel):
            # What `no_sync` sets. It also keeps DDP from sending rank 0's buffers.
            wrapped.require_backward_grad_sync = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._centered.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._center(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._center(control)

    def _center(self, control: Any) -> None:
        """Gives the model the center, until the next step, if it is evaluated or saved now."""
        self._centered.close()
        if control.should_evaluate or control.should_save:
            self._centered.enter_context(self.optimizer.at_center(together=True))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, best = self._trainer.model, None
        assert model is not None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            best = [parameter.detach().clone() for parameter in model.parameters()]
        self._centered.close()
        self.optimizer.finish()
        if best is not None:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), best, strict=True):
                    parameter.copy_(value)
