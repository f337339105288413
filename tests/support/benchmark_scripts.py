"""The scripts under `benchmarks`, imported by file path."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class _Finder:
    """Finds the scripts of one folder and those beside the folders, by which scripts import each
    other, before all else of their names."""

    def __init__(self, folder: Path) -> None:
        self.paths = {path.stem: path for path in (*BENCHMARKS.glob("*.py"), *folder.glob("*.py"))}

    def find_spec(self, name, path=None, target=None):
        if path is None and name in self.paths:
            return importlib.util.spec_from_file_location(name, self.paths[name])
        return None


@contextmanager
def benchmark_scripts(folder: str, *names: str) -> Iterator[SimpleNamespace]:
    """The modules `names` of benchmarks/`folder`. Afterwards nothing of the folder is left among
    the imported modules, and sys.path, to which scripts add, is as it was."""
    finder = _Finder(BENCHMARKS / folder)
    path = list(sys.path)
    modules_before = {name: sys.modules.pop(name, None) for name in finder.paths}
    sys.meta_path.insert(0, finder)
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.meta_path.remove(finder)
        sys.path[:] = path
        for name, module in modules_before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
