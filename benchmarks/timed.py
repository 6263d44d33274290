"""Run a stage in this process and note how long some of its functions took.

`python -m benchmarks.timed TIMES.json stages.rollout 1 0 -- stages.rollout:Sampler stages.rollout:publish` writes
{"stages.rollout:Sampler": seconds, ...}; calls of one function add up.
"""

import sys

from rlhf_core.sampling.engine import prepare_environment

if __name__ == "__main__" and sys.argv[2] == "stages.rollout":
    prepare_environment()  # as the stage itself does, before anything heavy is imported

import functools
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from rlhf_core.stage import run_stage, write_json


def main() -> None:
    """Wrap the functions, run the stage, write what they took."""
    out, module, *rest = sys.argv[1:]
    separator = rest.index("--")
    arguments, names = rest[:separator], rest[separator + 1 :]
    stage = import_module(module)
    seconds = dict.fromkeys(names, 0.0)
    for name in names:
        owner, _, attribute = name.partition(":")
        setattr(import_module(owner), attribute, timed(getattr(import_module(owner), attribute), seconds, name))
    sys.argv = [module, *arguments]
    path = Path(out).resolve()
    run_stage(f"{module.removeprefix('stages.')}@{arguments[0]}", lambda: noted(stage.main, path, seconds))


def noted(run: Callable[[], None], path: Path, seconds: dict[str, float]) -> None:
    """Run a stage and write the seconds."""
    run()
    write_json(path, seconds)


def timed(function: Callable[..., Any], seconds: dict[str, float], name: str) -> Callable[..., Any]:
    """Return a function that does the same and adds what it took."""

    @functools.wraps(function, updated=())
    def wrapper(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            seconds[name] += time.perf_counter() - started

    return wrapper


if __name__ == "__main__":
    main()
