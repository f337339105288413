"""A forked program is what `python` makes of its words, but for the imports: tests rely on it."""

import os
import subprocess
import sys

import pytest

from tests.support import forked

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="nothing is forked here")

SAYS = """
import os, sys
print(__name__, sys.argv[1:], os.getcwd(), os.environ["WORD"], sys.path[0], "numba" in globals())
print("said\\r\\n", end="", file=sys.stderr)
"""
ENDINGS = {
    "its end": "",
    "a status": "sys.exit(3)",
    "an exception": "raise ValueError('no')",
    "an interrupt": "import signal; os.kill(os.getpid(), signal.SIGINT)",
    "a kill": "import signal; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)",
}
WORDS = {
    "-c": ("-c", "{text}", "a", "b c"),
    "-m": ("-m", "program", "a", "b c"),
    "a file": ("program.py", "a", "b c"),
}


def outcomes(words, folder):
    """(status, standard output, last line of standard error) of a forked program, and of one that
    imports by itself."""
    given = {"cwd": folder, "env": {**os.environ, "WORD": "here"}}
    process = forked.start(words, **given)
    assert isinstance(process, forked.Process)
    out, errors = process.communicate(timeout=120)
    yield process.returncode, out, errors.splitlines()[-1]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, **given)
    yield done.returncode, done.stdout, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_as_it_would_by_itself(ending, tmp_path):
    one, other = outcomes(("-c", SAYS + ENDINGS[ending]), tmp_path)
    assert one == other
    assert one[1].startswith("__main__ []")


@pytest.mark.parametrize("kind", WORDS)
def test_a_program_has_its_own_words_folder_environment_and_path(kind, tmp_path):
    (tmp_path / "program.py").write_text(SAYS)
    one, other = outcomes([word.format(text=SAYS) for word in WORDS[kind]], tmp_path)
    assert one == other
    assert "['a', 'b c']" in one[1]


def test_a_program_has_the_package_already_and_ends_by_a_signal(tmp_path):
    text = "import sys, time; print('torch' in sys.modules, flush=True); time.sleep(600)"
    process = forked.start(["-c", text], cwd=tmp_path, env=dict(os.environ))
    assert process.stdout.readline() == "True\n"
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=120)
    assert process.returncode == -9
