"""Makes a folder's packages importable, and torchvision, which many need, without its compiled ops.

torchvision's wheels are built for one torch each, and its compiled part does not load beside
another. Its networks need none of it; its import does, for it describes its ops to torch. Here
those ops exist by name and cannot be called.
"""

import importlib.util
import re
import sys
from pathlib import Path

import torch


def make_importable(folder: str) -> None:
    """`folder`: where `pip install --no-deps --target FOLDER` put the packages, or ""."""
    if folder:
        sys.path.append(str(Path(folder).resolve()))
    while importlib.util.find_spec("torchvision") is not None:
        try:
            import torchvision  # noqa: F401

            return
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            torch.library.define(f"torchvision::{missing[1]}", "() -> ()")
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
