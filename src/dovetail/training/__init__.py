"""Asynchronous data-parallel training: update rules, a parameter server, workers, backends.

This package knows arrays and a callable that computes a gradient, and no graphs. Importing it does
not import torch.

Below are all names that the rest of the package uses, each in the file that has it. The rest
imports them from here. A file is imported with the first use of one of its names, so that the
command line can show its help without torch and numpy.
"""

# ruff: noqa: F401 - the imports are for type checkers, and `_NAMES` says the same to Python
from importlib import import_module
from typing import TYPE_CHECKING

_NAMES = {
    "backends": "BACKENDS load_backend",
    "backends.contract": "Assignment Backend FailurePolicy Guard Storage Watcher",
    "callbacks": "Callback RunState",
    "checkpoint": "RunFolder check_held open_folder",
    "datasets": "open_dataset split_batch",
    "history": "Column History columns_of common_level events_of lower_is_better",
    "keras_models": "check_keras is_keras with_added_losses",
    "learner": "Gradient Learner",
    "liveness": "alive",
    "modules": "ModuleLearner check_gpu_name device_of flatten parameters_of",
    "own_loop": "Optimizer",
    "pickling": "check_travels",
    "preparing": "bind_rule prepare",
    "records": "Evaluation Event Job Outcome Row Vector",
    "request": "TrainRequest launched_rank launched_ranks named_backend prints",
    "rules": "RULES make_rule",
    "rules.contract": "Rule",
    "step_times": "StepTimes read_trace",
    "tensorboard": "Scalars check_tensorboard",
    "torch_optimizers": "resolve_optimizer settings_of_all",
    "trainer": "DivergenceWarning Trainer train",
    "validation": "batches_of",
}
"""File of this package -> the names in it that others use."""
_FILES = ("advice", "analysis", "predicting")
"""Files that others use as a whole."""

if TYPE_CHECKING:
    from dovetail.training import advice, analysis, predicting
    from dovetail.training.backends import BACKENDS, load_backend
    from dovetail.training.backends.contract import (
        Assignment,
        Backend,
        FailurePolicy,
        Guard,
        Storage,
        Watcher,
    )
    from dovetail.training.callbacks import Callback, RunState
    from dovetail.training.checkpoint import RunFolder, check_held, open_folder
    from dovetail.training.datasets import open_dataset, split_batch
    from dovetail.training.history import (
        Column,
        History,
        columns_of,
        common_level,
        events_of,
        lower_is_better,
    )
    from dovetail.training.keras_models import check_keras, is_keras, with_added_losses
    from dovetail.training.learner import Gradient, Learner
    from dovetail.training.liveness import alive
    from dovetail.training.modules import (
        ModuleLearner,
        check_gpu_name,
        device_of,
        flatten,
        parameters_of,
    )
    from dovetail.training.own_loop import Optimizer
    from dovetail.training.pickling import check_travels
    from dovetail.training.preparing import bind_rule, prepare
    from dovetail.training.records import Evaluation, Event, Job, Outcome, Row, Vector
    from dovetail.training.request import (
        TrainRequest,
        launched_rank,
        launched_ranks,
        named_backend,
        prints,
    )
    from dovetail.training.rules import RULES, make_rule
    from dovetail.training.rules.contract import Rule
    from dovetail.training.step_times import StepTimes, read_trace
    from dovetail.training.tensorboard import Scalars, check_tensorboard
    from dovetail.training.torch_optimizers import resolve_optimizer, settings_of_all
    from dovetail.training.trainer import DivergenceWarning, Trainer, train
    from dovetail.training.validation import batches_of
else:
    _EXPORTS = {name: module for module, names in _NAMES.items() for name in names.split()}
    __all__ = [*_EXPORTS, *_FILES]

    def __getattr__(name):
        if name in _FILES:
            return import_module(f"{__name__}.{name}")
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
