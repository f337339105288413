"""Trains by an update rule in the `Trainer` of Lightning.

    trainer = Trainer(devices=2, strategy=RuleStrategy("adag-agn", window=8), ...)
    trainer.fit(module, data)

Each process trains its own copy of the module. Lightning starts the processes, or torchrun does.
"""

from contextlib import ExitStack
from typing import Any

import torch

from dovetail.errors import MissingLibraryError, UsageError
from dovetail.training import Optimizer, Rule

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    try:
        # The same under the name that it had before, in a package of its own.
        from pytorch_lightning.strategies import DDPStrategy  # type: ignore[assignment,unused-ignore]
    except ImportError as error:
        raise MissingLibraryError("lightning", "pip install 'dovetail[lightning]'") from error


class RuleStrategy(DDPStrategy):  # type: ignore[misc,unused-ignore]
    """Lightning's strategy for processes with whole copies, whose optimizer is
    `dovetail.Optimizer` in place of a model that averages gradients.

    rule, window   those of `Optimizer`
    settings       those of Lightning's `DDPStrategy`, such as `process_group_backend`

    The module is evaluated and saved as the center, and all processes evaluate the same one. After
    `fit` it is the last center. The module has one optimizer. Its state in a checkpoint is rank
    0's.
    """

    strategy_name = "dovetail"

    def __init__(
        self, rule: Rule | str = "adag-agn", window: int | str | None = "auto", **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._rule, self._window = rule, window
        self._trained: Optimizer | None = None
        self._centered = ExitStack()

    def configure_ddp(self) -> None:
        """Gives all processes rank 0's weights and buffers, and leaves the module unwrapped."""
        assert self.model is not None
        for tensor in self.model.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                torch.distributed.broadcast(tensor, 0)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        made: list[torch.optim.Optimizer] = getattr(self, "optimizers")  # noqa: B009  untyped
        if len(made) != 1:
            raise UsageError("configure_optimizers", f"returns {len(made)}; a rule trains by one")
        self._trained = Optimizer(made[0], self._rule, self._window)
        self.optimizers = [self._trained]

    def on_validation_start(self) -> None:
        if self._trained is not None:
            self._centered.enter_context(self._trained.at_center(together=True))
        super().on_validation_start()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._centered.close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module with the center's parameters, for checkpoints."""
        if self._trained is None:
            return dict(super().lightning_module_state_dict())
        assert self.lightning_module is not None
        return self._trained.center_state_dict(self.lightning_module)

    def on_train_end(self) -> None:
        if self._trained is not None:
            self._trained.finish()
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        if self._trained is not None:
            self._trained.close()
        super().on_exception(exception)
