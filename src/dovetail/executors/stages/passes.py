"""Seconds of kernels within a step: passes of one kernel after another, each of them timed.

What runs over and over finds its weights and inputs in the caches; in a step other kernels have
been there since. Large weights, concatenations and poolings take several times as long then. What
a call from Python takes is taken off: a step calls many kernels at once. It is that of a function
that does nothing, run last in every pass.
"""

from collections.abc import Callable

import numpy as np
import torch

from dovetail.executors.stages.functions import Functions, Values, running
from dovetail.runtime.timers import clock

_WARM_UP_PASSES, _LEAST_PASSES, _MOST_PASSES = 2, 5, 100
_SECONDS = 3.0
LEAST_SECONDS = 1e-7
"""What a kernel is taken to need: one that makes views alone takes as long as a call."""


def seconds_in_passes(
    functions: Functions,
    values: Values,
    kernels: int,
    threads: int,
    progress: Callable[[float], None] = lambda _fraction: None,
) -> list[list[float]]:
    """[kernels][passes], as many as three seconds allow. values: of a step, all of them."""
    nothing = (functions.size,)
    runs = [functions.of([kernel]) for kernel in range(kernels)]
    runs.append(functions.traced(lambda given: (given,), nothing, nothing))
    found: list[list[float]] = [[] for _ in runs]
    torch.set_num_threads(threads)
    with running():
        began = clock()
        for number in range(_WARM_UP_PASSES + _MOST_PASSES):
            for function, seconds in zip(runs, found, strict=True):
                given = [values[tensor] for tensor in function.takes]
                start = clock()
                made = function.run(*given)
                seconds.append(clock() - start)
                for tensor, value in zip(function.returns, made, strict=True):
                    values[tensor] = value
            spent = (clock() - began) / _SECONDS
            progress(min(1.0, max(spent, (number + 1) / (_WARM_UP_PASSES + _MOST_PASSES))))
            if spent > 1 and number + 1 >= _WARM_UP_PASSES + _LEAST_PASSES:
                break
    call = float(np.median(found.pop()[_WARM_UP_PASSES:]))
    return [
        [max(LEAST_SECONDS, taken - call) for taken in seconds[_WARM_UP_PASSES:]]
        for seconds in found
    ]
