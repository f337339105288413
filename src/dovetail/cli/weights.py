"""Writes and reads the weights of a trained model.

    weights.pt, any other name   torch.save of the model's state_dict
    weights.safetensors          its tensors as safetensors
    folder/                      a checkpoint of torch.distributed.checkpoint

Each is written whole or not at all. Only the first two are read here: a distributed checkpoint
holds a pickle, which may run anything.
"""

import io
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.cli.arguments import check_folder
from dovetail.errors import FileFormatError, UnwritableError, UsageError
from dovetail.runtime.files import check_archive, files_only, new_mode, write_atomically

OUT_HELP = (
    "Write the trained weights (state_dict): by torch.save, as .safetensors, or with a / at the "
    "end a folder for torch.distributed.checkpoint"
)


def is_folder(out: str) -> bool:
    """Whether an output's text names a folder, which need not exist."""
    return out.endswith("/")


def check_new_folder(out: str, taken: Mapping[str, Path | None]) -> None:
    """Raises `UsageError` for a folder that holds anything or will, and `UnwritableError` for one
    that cannot be made.

    taken   option -> where it writes
    """
    path = Path(out).resolve()
    check_folder(path)
    # A folder is replaced as a whole, which the current one, a mount point and one that others
    # write into cannot be.
    for name, other in taken.items():
        if other is not None and path in (other.resolve(), *other.resolve().parents):
            raise UsageError("--out", f"{out} is where {name} writes; name a new folder")
    is_used = path.is_mount() or path == Path.cwd() or path in Path.cwd().parents
    if path.exists() and (is_used or not path.is_dir() or any(path.iterdir())):
        raise UsageError("--out", f"{out} is there already; name a new folder")


def check_holds(model: Any, out: str) -> None:
    """Raises `UsageError` if the form cannot hold the model's state."""
    import torch

    if not out.endswith(".safetensors"):
        return
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            says = f"the model's {name} is no tensor, which safetensors cannot hold"
            raise UsageError("--out", f"{says}; name another file")


def save_weights(model: Any, out: str) -> None:
    """Write the model's `state_dict`. Raises `UnwritableError`."""
    import torch

    state = model.state_dict()
    if is_folder(out):
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

        target = Path(out).resolve()
        temporary = ""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:80]}.")
            with warnings.catch_warnings():
                # torch warns that one process alone saves, as is meant here.
                warnings.simplefilter("ignore")
                save_checkpoint(dict(state), checkpoint_id=temporary, no_dist=True)
            os.chmod(temporary, new_mode(0o777))
            # An empty folder of that name is replaced.
            os.rename(temporary, target)
        except OSError as error:
            raise UnwritableError(str(target), error.strerror or str(error)) from error
        except CheckpointException as error:
            # It is no `Exception`, and holds what each process raised.
            causes = [cause for cause, _ in error.failures.values()]
            said = first_line(causes[0] if causes else error)
            raise UnwritableError(str(target), said) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    elif out.endswith(".safetensors"):
        from safetensors.torch import save

        # safetensors holds no two tensors that share memory, so tied parameters are written twice.
        write_atomically(out, save({k: v.detach().contiguous().clone() for k, v in state.items()}))
    else:
        content = io.BytesIO()
        torch.save(state, content)
        write_atomically(out, content.getvalue())


def first_line(error: BaseException) -> str:
    """The error's text, as part of a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def load_weights(model: Any, path: Path) -> None:
    """Put the weights of a file into the model. Raises `FileFormatError`."""
    import torch
    from safetensors.torch import load

    try:
        if path.suffix == ".safetensors":
            with open(path, "rb", opener=files_only) as file:
                state: Any = load(file.read())
        else:
            check_archive(path)
            # A mapped tensor is a part of the file, so that it can be no larger than the file is.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise FileFormatError(str(path), error.strerror or str(error)) from None
    except FileFormatError:
        raise
    except Exception as error:  # torch raises all kinds for a damaged file
        raise FileFormatError(str(path), f"it holds no weights: {first_line(error)}") from None
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError, KeyError) as error:
        text = re.sub(r"\s+", " ", str(error)).strip()[:300]
        raise FileFormatError(str(path), f"it does not fit the model: {text}") from None
