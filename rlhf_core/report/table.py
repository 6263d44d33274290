"""Base against latest in the terminal: `python -m rlhf_core.report.table`, also `rlhf summary`."""

import sys
from pathlib import Path

from rlhf_core.config import load_run
from rlhf_core.errors import RlhfError
from rlhf_core.report.metrics import chain_rows, read_json
from rlhf_core.report.plots import number
from rlhf_core.report.terminal import console, iteration_table


def print_summary(root: Path) -> None:
    """Print the metrics of the main chain, the gain of held-out score with its interval, and where the report is.

    Args:
        root: Project directory.

    Raises:
        ArtifactError: If the pipeline has not run to its end.
    """
    screen = console()
    screen.print(iteration_table(chain_rows(load_run(root), root), "eval/score_mean"))
    row = read_json(root / "data/metrics/summary.json")
    gain, low, high = (row.get(f"eval/score_gain{end}") for end in ("", "_low", "_high"))
    if gain is not None and low is not None and high is not None:
        sure = "larger than the noise of the evaluation" if low > 0 or high < 0 else "not told apart from noise"
        screen.print(
            f"held-out score {number(row['eval/score_base'])} (base) -> {number(row['eval/score_final'])}:"
            f" {gain:+.3f}, 95% interval {low:+.3f} to {high:+.3f} (paired bootstrap over prompts), {sure}"
        )
    screen.print("report: data/report/index.html, curves: dvc plots show")


if __name__ == "__main__":
    try:
        print_summary(Path("."))
    except RlhfError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
