"""Policy files: safetensors, with a model card in the header.

    8 bytes │ header, JSON: {"__metadata__": {"card": JSON}, name: {dtype, shape, offsets}} │ data

card   the fields of `_Card`: what the policy is, and what it was trained on

A file holds numbers and text only. Its method is looked up in a fixed table and its config checked
against what that method takes; the policy is built without memory first, so that a file whose
tensors do not fit its config costs nothing.
"""

import inspect
import json
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dovetail.errors import PolicyFileError, PolicyMismatchError, UnwritableError
from dovetail.placers.learned.features import VERSION
from dovetail.placers.learned.policy import Policy
from dovetail.runtime.files import files_only, write_atomically
from dovetail.runtime.formats import Number, Version1, Whole, WholeNumbers, first_complaint
from dovetail.units import format_bytes

SHIPPED = Path(__file__).parent / "pretrained" / "gdp.safetensors"
MOST_BYTES = 2**30
"""Largest policy file that is read."""
MOST_HEADER_BYTES = 2**22
MOST_SIZE = 2**16
"""Largest number in a config but for its seed: no width and no count of ours comes near it."""
MOST_SEED = 2**63 - 1
MAY_BE_ZERO = ("seed", "stay", "bound", "noise", "noise_until", "greedy_from")
"""Whole numbers of a config that are no size."""
Scalar = bool | int | float | str | None


class _Card(BaseModel):
    """What must be there, and the types of what may be; more is kept as it stands."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    format: Literal["dovetail.policy"]
    version: Version1
    features: Whole
    method: str
    config: dict[str, Scalar | WholeNumbers]
    trained_on: list[str] = []
    seed: Whole = 0
    updates: Whole = Field(0, ge=0)
    trials: Whole = Field(0, ge=0)
    seconds: Number = Field(0, ge=0)
    versions: dict[str, str] = {}


def shipped() -> Path:
    """The pretrained GDP policy that comes with the package. Raises `PolicyFileError` without."""
    if not SHIPPED.is_file():
        raise PolicyFileError(
            str(SHIPPED),
            "the pretrained policy is not in this installation; install the package again, or name "
            "a policy file of yours, --policy FILE",
        )
    return SHIPPED


def save_policy(path: str | Path, policy: Policy, card: dict[str, object]) -> None:
    """Write a policy and its card, whole or not at all. Equal policies and cards: equal bytes.

    card   what `_Card` names; its method, config and features are the policy's

    Raises `UnwritableError`, for a policy that is not finite as well.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in policy.state_dict().items()}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UnwritableError(str(path), f"{name} of the policy is not finite; train it anew")
    whole = card | {
        "format": "dovetail.policy",
        "version": 1,
        "features": VERSION,
        "method": policy.name,
        "config": policy.config,
    }
    text = json.dumps(whole, allow_nan=False, sort_keys=True)
    arrays = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}
    write_atomically(path, save(arrays, metadata={"card": text}))


def load_policy(path: str | Path, expect: str | None = None) -> tuple[Policy, dict[str, object]]:
    """(policy, card) of a file, on the CPU and ready to draw.

    expect   the method that it must be of; None: any

    Raises `PolicyFileError` for what is broken, cut off, foreign or of another version, and
    `PolicyMismatchError` for another method.
    """
    from dovetail.placers.learned.catalog import LEARNED  # every method's module

    data, card, count = _open(path)
    if card.features != VERSION:
        detail = f"made for features {card.features}, but this version computes {VERSION}"
        raise PolicyFileError(str(path), detail)
    if expect is not None and card.method != expect:
        raise PolicyMismatchError(str(path), f"it is of method {card.method}, not {expect}")
    if card.method not in LEARNED:
        detail = f"method {card.method!r} is not one of {', '.join(LEARNED)}"
        raise PolicyFileError(str(path), detail)
    cls, config = LEARNED[card.method].policy, card.config

    # The policy that the config describes, without memory for its parameters.
    for name, value in config.items():
        # So deep a network has as many tensors: else building it could take for ever.
        most = count if "layer" in name else MOST_SEED if name == "seed" else MOST_SIZE
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            counts = isinstance(number, int) and not isinstance(value, list)
            least = 1 if counts and name not in MAY_BE_ZERO else 0
            if not least <= number <= most:
                raise PolicyFileError(str(path), f"config: {name} is {number}, out of bounds")
    try:
        inspect.signature(cls).bind(**config)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            wanted = cls(**config).state_dict()
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise PolicyFileError(str(path), f"config: {e}") from None

    # The parameters, which have the names, shapes and types of that policy's.
    try:
        found = {name: torch.from_numpy(array) for name, array in load(data).items()}
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise PolicyFileError(str(path), str(error)) from None
    if found.keys() != wanted.keys():
        odd = sorted(found.keys() ^ wanted.keys())[0]
        raise PolicyFileError(str(path), f"tensor {odd!r} is missing, or too many")
    for name, tensor in found.items():
        like = wanted[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            detail = f"{tuple(tensor.shape)} of {tensor.dtype}, not {tuple(like.shape)}"
            raise PolicyFileError(str(path), f"tensor {name!r} is {detail} of {like.dtype}")
        if not torch.isfinite(tensor).all():
            raise PolicyFileError(str(path), f"tensor {name!r} is not finite")
    with torch.random.fork_rng(devices=[]):
        policy = cls(**config)
    policy.load_state_dict(found)
    return policy, card.model_dump()


def read_card(path: str | Path) -> dict[str, object]:
    """The card alone, whatever features it was made for. Raises `PolicyFileError`."""
    return _open(path)[1].model_dump()


def _open(path: str | Path) -> tuple[bytes, _Card, int]:
    """(the file's bytes, its card, the number of its tensors). What the header says of tensors is
    checked by safetensors."""
    try:
        if not Path(path).is_file():
            raise PolicyFileError(str(path), "no such file")
        with open(path, "rb", opener=files_only) as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise PolicyFileError(str(path), str(error)) from None
    if len(data) > MOST_BYTES:
        raise PolicyFileError(str(path), f"it is larger than {format_bytes(MOST_BYTES)}")
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, MOST_HEADER_BYTES):
        raise PolicyFileError(str(path), "not a safetensors file, or it was cut off")
    try:
        header = dict(json.loads(data[8 : 8 + size]))
        metadata = header.pop("__metadata__", None)
        card = None if metadata is None else json.loads(metadata["card"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PolicyFileError(str(path), f"its header is no policy's: {error}") from None
    except RecursionError:
        raise PolicyFileError(str(path), "its header is nested too deeply") from None
    try:
        return data, _Card.model_validate(card), len(header)
    except ValidationError as error:
        raise PolicyFileError(str(path), f"its card: {first_complaint(error)}") from None
