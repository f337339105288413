import pytest

from dovetail.units import (
    UNLIMITED_BYTES,
    UNLIMITED_RATE,
    format_bandwidth,
    format_capacity,
    parse_bytes,
    printable,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("500MB", 500_000_000), ("12 GiB", 12 * 2**30), ("1e3", 1000)],
)
def test_sizes_are_read_with_their_units(text, size_bytes):
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["lots", "-1", "1e400", "1e300 GiB", "9e18"])
def test_what_is_no_size_or_more_than_can_be_counted_is_refused(text):
    with pytest.raises(ValueError, match=text):
        parse_bytes(text)


def test_control_characters_are_written_out_and_lines_and_letters_stay():
    assert printable("\x1b]0;x\x07\r\x9b\x7f") == r"\x1b]0;x\x07\r\x9b\x7f"
    assert printable("\ud800") == r"\ud800"
    assert printable("a\tb\nüß→ \\x") == "a\tb\nüß→ \\x"


def test_what_has_no_limit_is_called_unlimited():
    assert format_capacity(UNLIMITED_BYTES) == format_capacity(2**50) == "unlimited"
    assert format_capacity(2**40) == "1024 GiB"
    assert format_bandwidth(UNLIMITED_RATE) == "unlimited"
    assert format_bandwidth(1.34e10) == "13.4 GB/s"
