"""Compute the memory of the rows that are short of it, and compare it with `TIGHT_BYTES`.

    python benchmarks/rl17/tight.py [FOLDER]

Captures each network on 4 GPUs, or takes its graph from FOLDER, by default `rows` beside this file,
and prints the table that `reproductions/cases.py` holds. The exit status is 1 if it holds
another.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from reproductions import graphs
from reproductions.cases import RL17_CASES, TIGHT_BYTES, machine_of
from reproductions.methods import tight_bytes
from reproductions.store import Store


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "rows"
    store, found = Store(folder, print), dict[str, int]()
    for case in RL17_CASES:
        if case.gpus == 4 and case.gpu_memory_bytes is None:
            found[case.key] = tight_bytes(graphs.graph_for(store, case), machine_of(case))
            print(f'    "{case.key}": {found[case.key]:_},', flush=True)
    return int(found != TIGHT_BYTES)


if __name__ == "__main__":
    sys.exit(main())
