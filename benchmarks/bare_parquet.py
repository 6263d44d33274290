"""Read shards and write them with four more float columns by pyarrow alone: `benchmarks.bare_parquet SOURCE TARGET`.

What benchmarks/advantages.py compares the stage with: no checks, no hashes, no arithmetic, and the same
columns in the same encoding.
"""

import sys
from pathlib import Path

import pyarrow.parquet as pq

from rlhf_core.artifacts.shards import encoding


def main() -> None:
    """Copy logprobs into the new columns, shard by shard."""
    source, target = map(Path, sys.argv[1:3])
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        table = pq.read_table(path)
        for name in ("importance_weights", "rewards", "advantages", "returns"):
            table = table.append_column(name, table["logprobs"])
        pq.write_table(table, target / path.name, **encoding(table.schema))


if __name__ == "__main__":
    main()
