"""More than a run usually has: `python -m benchmarks.load {responses,long,iterations} [COUNT]`.

responses   100,000 of 16 to 32 tokens through rollout's writer, score (tiny model, one rule) and advantages
long        16 responses of 10,000 tokens through score, advantages and ppo_update (tiny model)
iterations  metrics and evaluations of 1,000 iterations through `rlhf summary`, `rlhf inspect` and the report

Prints one JSON object for each step: seconds, memory of the process before it, and the highest during its first and its
last quarter, which tells growth from a plateau.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.artifacts.shards import read_metadata
from rlhf_core.cli import app
from rlhf_core.sampling.engine import Sample
from rlhf_core.sampling.rollouts import Prompt, sample_shards
from stages import advantages, ppo_update, report, score
from tests import fake_run, tiny_run
from tests.tiny import save_tiny

_PAGE = os.sysconf("SC_PAGE_SIZE")
ROLLOUTS = Path("data/rollouts/iteration=1")


def main() -> None:
    """Run one of the loads in a temporary directory."""
    load = {"responses": many_responses, "long": long_responses, "iterations": many_iterations}[sys.argv[1]]
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        load(*map(int, sys.argv[2:]))


def many_responses(count: int = 100_000) -> None:
    """Short responses by the number, from the sampler's hand to advantages."""
    made_run()
    with watched("rollout's writer", responses=count):
        write(count, shortest=16, longest=32, shard_prompts=64)
    for stage in (score, advantages):
        with watched(stage.__name__, responses=count):
            run(stage)


def long_responses(count: int = 16) -> None:
    """Responses of 10,000 tokens, two a shard, to the new policy."""
    made_run()
    tiny_run.change("sampling", max_new_tokens=10_000, max_model_len=16_384)
    tiny_run.change("ppo_update", ppo_epochs=1, minibatch_size=2)
    write(count, shortest=10_000, longest=10_000, shard_prompts=1)
    for stage in (score, advantages, ppo_update):
        with watched(stage.__name__, responses=count):
            run(stage)


def many_iterations(count: int = 1_000) -> None:
    """What a long run leaves behind, looked at."""
    grown_run(Path("."), count)
    with watched("stages.report", iterations=count):
        report.main()
    print(json.dumps({"page_mib": round(Path("data/report/index.html").stat().st_size / 2**20, 2)}), flush=True)
    for arguments in (["summary"], ["inspect", "data/evaluations", "--sort", "-score", "--limit", "3"]):
        with watched("rlhf " + " ".join(arguments), iterations=count), contextlib.redirect_stdout(io.StringIO()):
            app(arguments, standalone_mode=False)


def made_run() -> None:
    """A tiny model with its critic, about to sample."""
    tiny_run.build(save_tiny(Path("model").resolve()))
    tiny_run.set_rewards(rule={"kind": "regex", "pattern": "a", "match": "search"})
    tiny_run.change("compute", max_batch_tokens=20_000)
    tiny_run.change("score", max_mismatch_k3=1e9)  # the sampler below throws dice


class Dice:
    """A sampler that throws dice: ids of plain bytes, a plausible logprob, and a stop in half of the responses."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest

    def sample(self, prompt_ids: list[list[int]], *, n: int, seed: int, **_: Any) -> list[list[Sample | None]]:
        """Return n responses to each prompt."""
        dice = np.random.default_rng(seed)
        return [[self._one(dice) for _ in range(n)] for _ in prompt_ids]

    def _one(self, dice: np.random.Generator) -> Sample:
        ids = dice.integers(10, 250, dice.integers(self.shortest, self.longest, endpoint=True)).tolist()
        stop = bool(dice.integers(2))
        return Sample([*ids[:-1], 2] if stop else ids, [-5.0] * len(ids), "stop" if stop else "length")


def write(count: int, *, shortest: int, longest: int, shard_prompts: int) -> None:
    """Write responses as rollout does, two to a prompt."""
    metadata = read_metadata(ROLLOUTS)
    shutil.rmtree(ROLLOUTS)
    prompts = [Prompt(f"p{index}", "p", tiny_run.PROMPT, None) for index in range(count // 2)]
    shards = [prompts[start : start + shard_prompts] for start in range(0, len(prompts), shard_prompts)]
    sample_shards(
        Dice(shortest, longest), ROLLOUTS, shards, range(len(shards)), lambda ids: "a" * len(ids), iteration="1",
        seed=0, n=2, temperature=0.7, max_new_tokens=longest, eos_ids=metadata["eos_ids"],
        metadata={**metadata, "sampling": {"max_new_tokens": longest}},
    )  # fmt: skip


def run(stage: Any) -> None:
    """Run a stage of iteration 1 in this process."""
    sys.argv = ["stage", "1", "0"]
    stage.main()


def grown_run(root: Path, count: int) -> None:
    """Write a finished run of many iterations: the made-up one of three, its last iteration again and again."""
    fake_run.build(root, prompts=8, samples=2)
    entry = '  "{}": {{prev: "{}", rollout: {{}}, score: {{}}, advantages: {{}}, ppo_update: {{}}}}\n'
    text = "".join(entry.format(number, number - 1) for number in range(1, count + 1))
    (root / "iterations.yaml").write_text("iterations:\n" + text)
    for number in range(4, count + 1):
        shutil.copytree(root / "data/evaluations/iteration=3", root / f"data/evaluations/iteration={number}")
        for name in ("rollout", "score", "advantages", "ppo_update", "evaluate"):
            shutil.copy(root / f"data/metrics/{name}/3.json", root / f"data/metrics/{name}/{number}.json")


@contextlib.contextmanager
def watched(step: str, **facts: int) -> Iterator[None]:
    """Print how long a block took, and the memory of the process while it ran."""
    samples, ended = [resident()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            samples.append(resident())

    watcher, start = threading.Thread(target=watch), time.monotonic()
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    quarter = max(len(samples) // 4, 1)
    memory = {"before": samples[0], "first_quarter": max(samples[:quarter]), "last_quarter": max(samples[-quarter:])}
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"step": step, **facts, "seconds": seconds, "memory_mib": memory}), flush=True)


def resident() -> int:
    """Memory of this process, MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE // 2**20


if __name__ == "__main__":
    main()
