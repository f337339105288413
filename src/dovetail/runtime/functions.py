"""Imports and calls a function that the user names as package.module:function."""

import contextlib
import importlib
import inspect
import os
import sys
from typing import Any

from dovetail.errors import ModelError


def names_function(text: str) -> bool:
    """True if the text has the form package.module:function."""
    package, colon, function = text.partition(":")
    return (
        bool(colon)
        and function.isidentifier()
        and all(part.isidentifier() for part in package.split("."))
    )


def call_function(text: str) -> Any:
    """Call the function and return its result. The current folder is added to `sys.path` for it.

    Raises `ModelError` if the function cannot be imported, needs arguments or ends the program, and
    for an `ImportError` that it raises. All else that it raises passes.
    """
    package, _, name = text.partition(":")
    # `python -m` does this too; an installed script has only its own folder on the path.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(package), name, None)
    except (ImportError, SyntaxError) as error:
        module = package.removesuffix(".py")
        hint = f"; leave out .py: {module}:{name}" if module != package else ""
        raise ModelError(text, f"cannot import {package}: {error}{_keras()}{hint}") from error
    if not callable(function):
        raise ModelError(text, f"{package} has no function {name}")
    with contextlib.suppress(ValueError):  # a builtin without a signature
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise ModelError(text, f"is called without arguments, but {error}") from None
    try:
        return function()
    except ImportError as error:
        raise ModelError(text, f"cannot import what it needs: {error}{_keras()}") from error
    except SystemExit as error:
        raise ModelError(text, f"ends the program (SystemExit {error.code}) when called") from error


def _keras() -> str:
    return "; a Keras model needs KERAS_BACKEND=torch" if "keras" in sys.modules else ""
