"""What every page must keep to."""

import re


def check_self_contained(page, tags):
    """It fetches nothing, and its policy allows no script, no style attribute and no handler."""
    assert not [attrs for _, attrs in tags if {"src", "href"} & attrs.keys()]
    assert not re.search(r"https?://|url\(|@import", page)
    policy = next(a["content"] for _, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "script" not in [tag for tag, _ in tags]
    assert not [a for _, a in tags if any(k == "style" or k.startswith("on") for k in a)]
