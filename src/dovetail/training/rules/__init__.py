"""Update rules, one file each; `RULES` by name."""
