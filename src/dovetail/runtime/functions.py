"""Finds and calls a function that the user names as package.module:function."""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from dovetail.errors import ModelError, UserCodeError
from dovetail.runtime.user_code import UserCode, at


def names_function(text: str) -> bool:
    """True if the text has the form package.module:function."""
    package, colon, function = text.partition(":")
    return (
        bool(colon)
        and function.isidentifier()
        and all(part.isidentifier() for part in package.split("."))
    )


def find_function(text: str) -> Callable[..., Any]:
    """Import the function and return it. The current folder is added to `sys.path` for it.

    Raises `ModelError` for what cannot be imported or parsed, and for a module without such a
    function. Raises `UserCodeError` for whatever else the module raises, and if it ends the
    program.
    """
    package, _, name = text.partition(":")
    # `python -m` does this too; an installed script has only its own folder on the path.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = package.removesuffix(".py")
    hint = f"; leave out .py: {module}:{name}" if module != package else ""
    with _imports_named(text, f"cannot import {package}", hint), UserCode(f"importing {package}"):
        function = getattr(importlib.import_module(package), name, None)
    if not callable(function):
        raise ModelError(text, f"{package} has no function {name}")
    return function  # type: ignore[no-any-return]


def call_function(text: str) -> Any:
    """Call the function and return its result. Raises as `find_function` does, `ModelError` for a
    function that needs arguments, and `UserCodeError` for whatever else the function raises."""
    function = find_function(text)
    with contextlib.suppress(ValueError):  # a builtin without a signature
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise ModelError(text, f"is called without arguments, but {error}") from None
    with _imports_named(text, "cannot import what it needs"), UserCode(f"calling {text}", function):
        return function()


@contextlib.contextmanager
def _imports_named(text: str, what: str, hint: str = "") -> Iterator[None]:
    """Raises `ModelError` if what the user's code cannot do is to import or to parse something. The
    request then names something that is not there."""
    try:
        yield
    except UserCodeError as error:
        if not isinstance(error.__cause__, ImportError | SyntaxError):
            raise
        keras = "; a Keras model needs KERAS_BACKEND=torch" if "keras" in sys.modules else ""
        where = f" (at {error.location})" if error.location else ""
        detail = f"{what}: {error.said}{keras}{hint}{where}"
        raise ModelError(text, detail) from error.__cause__


def refused(text: str, returned: object, must: str) -> ModelError:
    """The error for a function that has returned something else than it must.

    must   says what, such as "must return (module, inputs)"
    """
    package, _, name = text.partition("?")[0].partition(":")
    function = getattr(sys.modules.get(package), name, None)
    what = type(returned).__name__
    if inspect.iscoroutine(returned):
        returned.close()  # or Python would warn that nobody awaits it
    if isinstance(returned, tuple):
        what = f"({', '.join(type(part).__name__ for part in returned[:6])})"
    return ModelError(text, f"{must}, not {'None' if returned is None else what}{at(function)}")
