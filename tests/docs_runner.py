"""Run the queries of a docs page in a directory of artifacts, as a reader would type them."""

import contextlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Query:
    """One fenced block that can be run."""

    title: str  # the heading above it
    language: str  # sql (DuckDB) or python
    code: str


def queries(page: Path) -> list[Query]:
    """Return the sql and python blocks of a page, each with the heading above it."""
    found, title = [], ""
    for heading, language, code in re.findall(
        r"(?m)^#{1,6} (.+)$|^```(\w*)\n((?:(?!```).*\n)*)```$", page.read_text(encoding="utf-8")
    ):
        title = heading or title
        if language in ("sql", "python"):
            found.append(Query(title, language, code))
    return found


def run(query: Query, directory: Path, home: Path) -> str:
    """Run a query in a directory and return what it prints.

    Args:
        query: What queries() found.
        directory: Holds data/.
        home: Where libraries may keep caches.
    """
    if query.language == "sql":
        import duckdb

        with contextlib.chdir(directory), duckdb.connect() as connection:
            return str(connection.sql(query.code))
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", query.code], cwd=directory, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, f"{query.title}\n{done.stderr}"
    return done.stdout
