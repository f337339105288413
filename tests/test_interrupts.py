"""Ctrl-C in a command, in the places where Python itself would lose it."""

import os
import subprocess
import sys
import textwrap

import pytest

BEGIN = """
    import signal, sys, time, types
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    from dovetail import interrupts
    interrupts.take_interrupts()
"""
TORCH = """
    torch = sys.modules["torch"] = types.ModuleType("torch")
    torch.__spec__ = types.SimpleNamespace()
"""
IMPORT = """
    try:
        import pressed
        print("goes on")
        time.sleep(60)
    except KeyboardInterrupt:
        print("KeyboardInterrupt with", *dir(pressed)[-1:])
"""
PRESS = "signal.raise_signal(signal.SIGINT)"


@pytest.fixture
def python(tmp_path):
    """Runs a program with a module `pressed`; returns its status, output and errors."""

    def run(*parts, pressed="import signal\n" + PRESS + "\nwhole = True", folder="site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pressed.py").write_text(pressed)
        (tmp_path / "program.py").write_text("".join(map(textwrap.dedent, (BEGIN, *parts))))
        path = os.pathsep.join([str(tmp_path), str(tmp_path / folder), *sys.path])
        done = subprocess.run(
            [sys.executable, "-m", "program"], env=os.environ | {"PYTHONPATH": path},
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def test_an_import_before_torch_ends_the_command(python):
    assert python(IMPORT) == (130, "", "interrupted\n")


def test_an_import_after_torch_ends_first(python):
    assert python(TORCH, IMPORT) == (0, "goes on\nKeyboardInterrupt with whole\n", "")


def test_the_import_of_a_module_of_the_users_own_is_interrupted(python):
    script = """
    try:
        import pressed
    except KeyboardInterrupt:
        print("heard")
    """
    assert python(TORCH, script, folder="own") == (0, "heard\n", "")


def test_a_second_interrupt_does_not_wait_for_an_import(python):
    endless = f"import signal, time\n{PRESS}\ntime.sleep(0.3)\n{PRESS}\ntime.sleep(60)"
    settings = "interrupts.AGAIN_SECONDS = 0.1\ninterrupts.RETRY_SECONDS = 30\n"
    assert python(settings, TORCH, IMPORT, pressed=endless) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "callback",
    [
        f"class Gone:\n    def __del__(self): {PRESS}\nGone()\n",
        f"import weakref\nclass Gone: pass\nweakref.finalize(Gone(), lambda: {PRESS})\n",
    ],
)
def test_a_callback_whose_exceptions_python_drops_loses_no_interrupt(python, callback):
    wait = "time.sleep(60)"
    done = f"""
    try:
        exec({callback!r})
        {wait}
    except KeyboardInterrupt:
        print("heard")
    """
    assert python(done) == (0, "heard\n", "")


def test_an_interrupt_that_left_code_of_a_text_does_not_change_the_status(python):
    script = f"""
    try:
        exec({PRESS!r})
    except KeyboardInterrupt:
        interrupts.end_of_interrupts()
        sys.exit(130)
    """
    assert python(script) == (130, "", "")


def test_the_end_of_a_command_is_not_interrupted(python):
    script = f"""
    import atexit
    atexit.register(lambda: {PRESS})
    interrupts.end_of_interrupts()
    """
    assert python(script) == (0, "", "")


def test_a_handler_of_the_programs_own_stays(python):
    script = f"""
    interrupts.leave_interrupts()
    signal.signal(signal.SIGINT, lambda *_: print("own"))
    interrupts.take_interrupts()
    {PRESS}
    print(interrupts.raises_interrupts())
    """
    assert python(script) == (0, "own\nFalse\n", "")
