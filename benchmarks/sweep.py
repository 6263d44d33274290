"""Five values of lambda over stored rollouts, by `dvc exp run`, against five iterations that sample and score anew.

    python -m benchmarks.sweep   # after `dvc repro` and with all changes committed; on the demo an hour on 2 cores

Works in a clone of the project whose outs are restored from its DVC cache; the project itself is not touched.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure
from rlhf_core.errors import RlhfError

LAMBDAS = (0.8, 0.9, 0.97, 0.99, 1.0)
TRAINING = ("advantages", "ppo_update")
ITERATION = ("rollout", "score", *TRAINING)


def main() -> None:
    """Run the sweep and one whole iteration, print the table, write the result."""
    arguments = parsed()
    work = arguments.work.resolve()
    try:
        clone(arguments.project.resolve(), work)
        iteration = timed(work, ["repro", "--force", "--single-item", *targets(ITERATION)])
        sweep = [
            timed(work, ["exp", "run", "--set-param", f"advantages.gae_lambda={value}", targets(TRAINING)[-1]])
            for value in LAMBDAS[: arguments.values]
        ]
    except RlhfError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        if not arguments.keep:
            shutil.rmtree(work, ignore_errors=True)
    result = {"iteration_seconds": iteration, "sweep_seconds": sweep, "share": sum(sweep) / (len(sweep) * iteration)}
    print(tables(result))
    print(f"\n{measure.written('sweep', result, arguments.json)}")


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("--project", type=Path, default=measure.ROOT, help="where `dvc repro` has run")
    parser.add_argument("--values", type=int, choices=range(1, len(LAMBDAS) + 1), default=len(LAMBDAS))
    parser.add_argument("--work", type=Path, default=measure.RESULTS / "sweep", help="scratch directory")
    parser.add_argument("--keep", action="store_true", help="leave the scratch directory there")
    parser.add_argument("--json", type=Path, help="where the result goes")
    return parser.parse_args()


def targets(stages: Sequence[str]) -> list[str]:
    """Return the names of these stages of the first iteration, as DVC knows them."""
    return [f"{stage}@1" for stage in stages]


def clone(project: Path, work: Path) -> None:
    """Clone the project with its dvc.lock, and restore its outs from its cache."""
    shutil.rmtree(work, ignore_errors=True)
    run(["git", "clone", "--quiet", str(project), str(work)], measure.ROOT)
    shutil.copy2(project / "dvc.lock", work / "dvc.lock")
    dvc(work, ["config", "--local", "cache.dir", str(project / ".dvc/cache")])
    dvc(work, ["checkout", "--quiet"])
    run(["git", "add", "--force", "dvc.lock"], work)
    identity = ["-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
    run(["git", *identity, "commit", "--quiet", "--allow-empty", "-m", "The finished run"], work)


def timed(work: Path, arguments: Sequence[str]) -> float:
    """Run dvc and return its seconds."""
    started = time.perf_counter()
    dvc(work, arguments)
    return time.perf_counter() - started


def dvc(work: Path, arguments: Sequence[str]) -> None:
    """Run dvc in the clone."""
    run([sys.executable, "-m", "dvc", *arguments], work)


def run(command: Sequence[str], cwd: Path) -> None:
    """Run a command.

    Raises:
        RlhfError: If it fails; it has said why.
    """
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, cwd=cwd, env={**os.environ, "PATH": binaries, "DVC_NO_ANALYTICS": "1"}, check=False)
    if done.returncode:
        raise RlhfError(f"{' '.join(command)} failed in {cwd}; its message is above")


def tables(result: dict[str, Any]) -> str:
    """Return the result for people."""
    rows = [
        ["one iteration: rollout, score, advantages, ppo_update", f"{result['iteration_seconds']:.0f} s"],
        ["one value of lambda through `dvc exp run`", f"{measure.spread(result['sweep_seconds']).text()} s"],
        [f"{len(result['sweep_seconds'])} values, share of as many iterations", f"{result['share']:.2f}"],
    ]
    return measure.table("a sweep of gae_lambda over stored rollouts", ["", ""], rows)


if __name__ == "__main__":
    main()
