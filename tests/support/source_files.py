"""What the files of the package import and define, read from their text."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "dovetail"


def imported_names(tree: ast.AST, package: tuple[str, ...], *, typing: bool) -> Iterator[str]:
    """Full names of what a module in `package` imports, wherever in the text it does; with
    `typing` also what only a type checker imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package[: len(package) - (node.level - 1)] if node.level else ()
            base = ".".join((*around, *filter(None, [node.module])))
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif typing or not _is_for_type_checkers(node):
            yield from imported_names(node, package, typing=typing)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_of_files(root: Path = SRC) -> dict[str, set[str]]:
    """file -> files that it imports when it runs, both relative to `root`, itself left out."""
    files = {str(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}
    imports = {}
    for name, path in files.items():
        package = (root.name, *Path(name).parent.parts)
        tree = ast.parse(path.read_text("utf-8"))
        imported = imported_names(tree, package, typing=False)
        targets = {_file_of(full_name, root.name, files.keys()) for full_name in imported}
        imports[name] = {target for target in targets if target and target != name}
    return imports


def _file_of(full_name, root, files):
    """The file of a module, or of the module that a name is in; None: it is not of the package."""
    parts = full_name.split(".")
    if parts[0] != root:
        return None
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[1:end])
        for candidate in (f"{path}.py", f"{path}/__init__.py".lstrip("/")):
            if candidate in files:
                return candidate
    return None


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of two or more files that all reach each other by imports, each group sorted."""
    reached = {name: _reached(name, imports) for name in imports}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in imports
        if name in reached[name]
    }
    return sorted(map(list, groups))


def _reached(name, imports):
    """Files that `name` reaches in one import or more."""
    reached, waiting = set(), [name]
    while waiting:
        for target in imports[waiting.pop()] - reached:
            reached.add(target)
            waiting.append(target)
    return reached


def classes_defined_twice(root: Path = SRC) -> dict[str, list[str]]:
    """class name -> the files that define a class of that name, for each name that two define."""
    files = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(root)))
    return {name: of_name for name, of_name in files.items() if len(of_name) > 1}
