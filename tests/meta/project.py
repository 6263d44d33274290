"""What the meta tests look at: the project's files and their syntax trees."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def project_files() -> tuple[Path, ...]:
    """Files under version control or about to be, that exist; relative to ROOT."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    return tuple(Path(name) for name in sorted(filter(None, listed.split("\0"))) if (ROOT / name).is_file())


def python_files(*folders: str) -> list[Path]:
    """Python files below these folders, relative to ROOT."""
    return [path for path in project_files() if path.suffix == ".py" and path.parts[0] in folders]


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file given relative to ROOT."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted module) of every import statement in a file, wherever it stands."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found
