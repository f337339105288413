"""What a command says of its progress where standard error is no terminal."""

import pytest

from dovetail.cli import output


@pytest.mark.parametrize(("quiet_seconds", "lines"), [(0.0, 2), (1e6, 0)])
def test_each_thing_that_is_done_is_a_line_once_a_second_has_passed(
    quiet_seconds, lines, monkeypatch, capsys
):
    monkeypatch.setattr(output, "QUIET_SECONDS", quiet_seconds)
    with output.progress_bar() as show:
        show("measuring ops", 0.1, None)
        show("measuring ops", 0.2, None)
        show("planning", 0.5, 1.0)
    said = capsys.readouterr().err.splitlines()
    assert [line.rpartition("  ")[2] for line in said] == ["measuring ops", "planning"][:lines]
