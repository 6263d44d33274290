"""How time and memory grow with the number of responses and with their length: `python -m benchmarks.growth`.

A tiny model, made-up responses, each stage a process of its own, its start included. Prints a table, writes the result,
and draws docs/growth.svg. What is linear has a flat line there; growth over iterations is in docs/soak.svg.
"""

import argparse
import contextlib
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import charts, load, measure
from rlhf_core.report.plots import Series
from tests import tiny_run

PLOT = Path(__file__).parents[1] / "docs/growth.svg"
MINIBATCH = 200  # responses at most
STAGES = ("score", "advantages", "ppo_update")


def main() -> None:
    """Measure both, print the tables, draw, write the result."""
    arguments = parsed()
    rows = {str(count): measured(many(count)) for count in arguments.rows}
    lengths = {str(length): measured(long(length, arguments.long_responses)) for length in arguments.lengths}
    print(table("responses of 16 to 32 tokens", "responses", rows))
    print(table(f"{arguments.long_responses} responses", "tokens of each", lengths))
    arguments.plot.write_text(drawn(rows, lengths, arguments.long_responses), encoding="utf-8")
    result = {"rows": rows, "long_responses": arguments.long_responses, "lengths": lengths}
    print(f"\n{measure.written('growth', result, arguments.json)}")


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--long-responses", type=int, default=64)
    parser.add_argument("--plot", type=Path, default=PLOT, help="where the chart goes")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def many(count: int) -> Callable[[], None]:
    """Return what writes so many short responses."""

    def write() -> None:
        tiny_run.change("rollout", prompts_per_iteration=count // 2, samples_per_prompt=2)
        tiny_run.change("ppo_update", ppo_epochs=1, minibatch_size=math.gcd(count, MINIBATCH))
        load.write(count, shortest=16, longest=32, shard_prompts=512)

    return write


def long(length: int, count: int) -> Callable[[], None]:
    """Return what writes responses of so many tokens."""

    def write() -> None:
        tiny_run.change("sampling", max_new_tokens=length, max_model_len=2 * length + 1024)
        tiny_run.change("compute", max_batch_tokens=8192)
        tiny_run.change("rollout", prompts_per_iteration=count // 2, samples_per_prompt=2)
        tiny_run.change("ppo_update", ppo_epochs=1, minibatch_size=math.gcd(count, 16))
        load.write(count, shortest=length, longest=length, shard_prompts=8)

    return write


def measured(write: Callable[[], None]) -> dict[str, Any]:
    """Run the stages over what is written; seconds and peak memory of each."""
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        load.made_run()
        write()
        ran = {name: measure.child(f"stages.{name}", "1", "0", cwd=Path(directory)) for name in STAGES}
    return {name: {"seconds": one.seconds, "peak_bytes": one.peak_bytes} for name, one in ran.items()}


def table(title: str, key: str, found: dict[str, Any]) -> str:
    """Return seconds and memory for people."""
    rows = [
        [size, *(f"{own[name]['seconds']:.1f} s, {own[name]['peak_bytes'] / 2**20:.0f} MiB" for name in STAGES)]
        for size, own in found.items()
    ]
    return measure.table(title, [key, *STAGES], rows)


def drawn(rows: dict[str, Any], lengths: dict[str, Any], responses: int) -> str:
    """Return four charts: time of one response or token, and memory."""

    def series(found: dict[str, Any], value: Callable[[str, dict[str, float]], float]) -> Sequence[Series]:
        return [Series(name, [value(size, own[name]) for size, own in found.items()]) for name in STAGES]

    memory: Callable[[str, dict[str, float]], float] = lambda size, own: own["peak_bytes"] / 2**20
    of_row: Callable[[str, dict[str, float]], float] = lambda size, own: own["seconds"] / int(size) * 1e3
    of_token: Callable[[str, dict[str, float]], float] = lambda size, own: own["seconds"] / int(size) / responses * 1e6
    parts = [
        ("milliseconds a response", "responses", rows, of_row),
        ("memory at its peak, MiB", "responses", rows, memory),
        ("microseconds a token", "tokens of a response", lengths, of_token),
        ("memory at its peak, MiB", "tokens of a response", lengths, memory),
    ]
    return charts.svg([charts.Chart(title, x, list(found), series(found, value)) for title, x, found, value in parts])


if __name__ == "__main__":
    main()
