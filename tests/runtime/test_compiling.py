"""The working clock stands still while numba compiles."""

import time

import numba

from dovetail.runtime.compiling import working_clock


def test_compiling_takes_no_working_time():
    began, before = time.monotonic(), working_clock()
    numba.njit(lambda x: x + 1)(1.0)
    worked, passed = working_clock() - before, time.monotonic() - began
    assert 0 <= worked < passed


def test_the_working_clock_goes_on_between():
    before = working_clock()
    while working_clock() == before:
        pass
    assert working_clock() > before
