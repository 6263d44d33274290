"""Write the code files that each stage depends on into dvc.yaml, in place, comments kept: `make deps`.

DVC does not follow Python imports, so every stage lists its own file and the project files that it imports, directly
or not, also inside functions. Files beside a module that it names in a string (a page template, say) count too.
Package files (__init__.py) without code are left out.
"""

import ast
import re
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

PACKAGES = ("rlhf_core", "stages")


def imported_names(tree: ast.Module, package: str) -> set[str]:
    """Return the dotted names that a module may load, wherever in it the import stands.

    Args:
        tree: The parsed module.
        package: Dotted name of the package that the module is in, for relative imports.

    Returns:
        For `from a.b import c` both "a.b" and "a.b.c": c may be a module or a name in one.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def module_files(name: str, root: Path) -> list[Path]:
    """Return the files that importing a dotted name executes: the module and the packages above it, [] if not ours."""
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        return []
    found = []
    for depth in range(1, len(parts) + 1):
        base = root.joinpath(*parts[:depth])
        candidates = (base.with_suffix(".py"), base / "__init__.py")
        found.extend(path for path in candidates if path.is_file())
    return found


def has_code(tree: ast.Module) -> bool:
    """Tell whether a module does more than carry a docstring."""
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in tree.body)


def data_files(tree: ast.Module, directory: Path) -> set[Path]:
    """Return files (or folders without Python) below a module's folder that one of its strings names."""
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", node.value)
        ):
            path = directory / node.value
            is_data_folder = path.is_dir() and path.name != "__pycache__" and not list(path.rglob("*.py"))
            if (path.is_file() and path.suffix != ".py") or is_data_folder:
                found.add(path)
    return found


def closure(entry: Path, root: Path) -> list[str]:
    """Return the sorted project files that a module depends on, itself included, relative to root with "/"."""
    packages = [path / "__init__.py" for path in entry.parents if path.is_relative_to(root) and path != root]
    todo = [entry, *filter(Path.is_file, packages)]
    seen, result = set(todo), set()
    while todo:
        path = todo.pop()
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        if path.name != "__init__.py" or has_code(tree):
            result.add(path)
        result |= data_files(tree, path.parent)
        package = ".".join(path.parent.relative_to(root).parts)
        for name in imported_names(tree, package):
            for file in module_files(name, root):
                if file not in seen:
                    seen.add(file)
                    todo.append(file)
    return sorted(path.relative_to(root).as_posix() for path in result)


def stage_file(stage: dict[str, Any], root: Path) -> Path:
    """Return the file that a stage's command runs (`python -m stages.NAME ...`)."""
    match = re.search(r"python -m stages\.(\w+)", stage["cmd"])
    if match is None:
        raise SystemExit(f"dvc.yaml: cannot tell which module this command runs: {stage['cmd']}")
    return root / "stages" / f"{match[1]}.py"


def stages_of(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return name -> definition of every stage, the inner part of a foreach."""
    return {name: stage.get("do", stage) for name, stage in content["stages"].items()}


def is_code(dependency: str) -> bool:
    """Tell whether a dependency in dvc.yaml is code of this project rather than data."""
    return dependency.split("/")[0] in PACKAGES


def update(text: str, root: Path) -> str:
    """Return dvc.yaml's text with every stage's code dependencies as they should be; all other lines stay."""
    lines = text.splitlines()
    for stage in reversed(stages_of(YAML().load(text)).values()):
        deps = stage["deps"]
        rows = [deps.lc.item(index)[0] for index in range(len(deps))]
        indent = lines[rows[0]][: lines[rows[0]].index("-")]
        kept = [lines[row] for row, dep in zip(rows, deps, strict=True) if not is_code(dep)]
        code = [f"{indent}- {file}" for file in closure(stage_file(stage, root), root)]
        lines[rows[0] : rows[-1] + 1] = kept + code
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite dvc.yaml of the current directory."""
    root = Path.cwd()
    path = root / "dvc.yaml"
    before = path.read_text(encoding="utf-8")
    after = update(before, root)
    if after != before:
        path.write_text(after, encoding="utf-8")
    print("dvc.yaml: changed" if after != before else "dvc.yaml: nothing to change", file=sys.stderr)


if __name__ == "__main__":
    main()
