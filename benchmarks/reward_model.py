"""Train a reward model on public preferences and compare it with length and words, on the same held-out pairs.

`python -m benchmarks.reward_model hh_rlhf --data DIR`; DIR holds the files that preference_data.FILES names. The stages
base_model, ingest and train_rm run as they do in the pipeline, in a scratch directory. docs/reward-model-results.md has
results.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML, YAMLError

from benchmarks import measure
from benchmarks.floors import Pairs, read_pairs, scikit_learn, shorter, wins, words
from benchmarks.preference_data import FILES, convert
from rlhf_core.algorithms.statistics import clustered_interval
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.models.checkpoint import MEASURED_SCORES
from rlhf_core.seeding import derive_seed
from rlhf_core.stage import write_json

ROOT = Path(__file__).parents[1]
PREFERENCES, MODEL, METRICS = "data/preferences", "data/checkpoints/reward_model", "data/metrics"
STAGES = ("base_model", "ingest", "train_rm")
# What differs from params.yaml, for each data set; --set changes it.
SETTINGS: dict[str, dict[str, Any]] = {
    "hh_rlhf": {"train_rm.learning_rate": 1e-4, "train_rm.batch_size": 16},
    "oasst": {"train_rm.learning_rate": 1e-4, "train_rm.batch_size": 8, "train_rm.loss": "plackett_luce"},
    "pandalm": {"train_rm.learning_rate": 1e-4, "train_rm.batch_size": 16},
}
# Ingest wants prompts, too; train_rm does not read them.
PROMPTS = '{"prompt": "a", "split": "train"}\n{"prompt": "b", "split": "eval"}\n'
_RESAMPLES, _CONFIDENCE = 2000, 0.95


def main() -> None:
    """Build the scratch project, run the stages, print the table, write the result."""
    arguments = parsed()
    work = (arguments.work or ROOT / ".work" / "benchmarks" / arguments.name).resolve()
    try:
        if not arguments.no_floor:
            scikit_learn()  # before training, not after
        if not arguments.report_only:
            changes = SETTINGS[arguments.name] | dict(map(setting, arguments.set))
            build(arguments.name, arguments.data, work, changes, arguments.history_words, arguments.system)
            run(work)
        result = measured(work, floor=not arguments.no_floor)
        print(table(result))
        write_json(work / "result.json", {"data": arguments.name, **result})
        print(f"\n{work / 'result.json'}")
    except RlhfError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward_model", description=__doc__)
    parser.add_argument("name", choices=FILES)
    parser.add_argument("--data", type=Path, required=True, help="directory with the data sets")
    parser.add_argument("--work", type=Path, help="scratch project; default .work/benchmarks/NAME")
    parser.add_argument("--set", action="append", default=[], metavar="GROUP.KEY=VALUE", help="over params.yaml")
    parser.add_argument("--history-words", type=int, metavar="N", help="keep the latest turns with at most N words")
    parser.add_argument("--system", metavar="TEXT", help="system turn; '' = an empty one, not the template's own")
    parser.add_argument("--no-floor", action="store_true", help="leave out TF-IDF, which needs scikit-learn")
    parser.add_argument("--report-only", action="store_true", help="measure what --work holds; train nothing")
    return parser.parse_args()


def setting(text: str) -> tuple[str, Any]:
    """Read GROUP.KEY=VALUE, the value as in params.yaml.

    Raises:
        ConfigError: If it is none.
    """
    key, equals, value = text.partition("=")
    if not equals or key.count(".") != 1:
        raise ConfigError(f"--set {text}: expected GROUP.KEY=VALUE, such as train_rm.epochs=2")
    try:
        return key, YAML(typ="safe").load(value)
    except YAMLError:
        raise ConfigError(f"--set {text}: the value is no YAML") from None


def build(
    name: str, data: Path, work: Path, changes: dict[str, Any], history_words: int | None, system: str | None
) -> None:
    """Write parameters and raw data of a scratch project.

    Args:
        name: Of FILES.
        data: Directory with the data sets.
        work: The scratch project.
        changes: "group.key" -> value, over params.yaml. The stages check them.
        history_words: As in preference_data.convert.
        system: System turn of every prompt that has turns; None = whatever the chat template does.

    Raises:
        ConfigError: If a group does not exist.
        DataError: If the data are not there.
    """
    yaml = YAML()
    params = yaml.load(ROOT / "params.yaml")
    raw = "data/raw/preferences.jsonl"
    for key, value in ({"ingest.prompts": "data/raw/prompts.jsonl", "ingest.preferences": raw} | changes).items():
        group, own = key.split(".")
        if not isinstance(params.get(group), dict):
            raise ConfigError(f"--set {key}: params.yaml has no group {group}")
        params[group][own] = value
    fraction, seed = params["ingest"]["eval_fraction"], params["seed"]
    options = {"history_words": history_words, "system": system, "eval_fraction": fraction, "seed": seed}
    convert(name, data, work / raw, **options)
    (work / "data/raw/prompts.jsonl").write_text(PROMPTS, encoding="utf-8")
    (work / "iterations.yaml").write_bytes((ROOT / "iterations.yaml").read_bytes())
    yaml.dump(params, work / "params.yaml")


def run(work: Path) -> None:
    """Run the stages as processes in a scratch project.

    Raises:
        ConfigError: If one fails; it has said why.
    """
    # Not the caller's PYTHONPATH: with the floor's packages in sight, transformers would import them.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    seconds = {}
    for stage in STAGES:
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-m", f"stages.{stage}"], cwd=work, env=environment, check=False)
        if done.returncode:
            raise ConfigError(f"{stage} failed in {work}; its message is above")
        seconds[stage] = round(time.monotonic() - started)
    write_json(work / "seconds.json", seconds)


def measured(work: Path, *, floor: bool) -> dict[str, Any]:
    """Return what is printed and written: every ranker on the same held-out pairs.

    Args:
        work: A scratch project whose stages have run.
        floor: Whether TF-IDF is fitted.
    """
    train, held_out = (read_pairs(work / PREFERENCES, split) for split in ("train", "eval"))
    raw = read_json(work / MODEL / MEASURED_SCORES)
    margins = [raw[name][a] - raw[name][b] for name, (a, b) in zip(held_out.names, held_out.places, strict=True)]
    right = {"reward model": wins(np.array(margins))}
    right |= {"shorter response": wins(shorter(held_out)), "longer response": wins(-shorter(held_out))}
    if floor:
        right["TF-IDF Bradley-Terry"] = wins(words(train.texts, held_out.texts))
    params = YAML(typ="safe").load(work / "params.yaml")
    return {
        "pairs": len(train.names),
        "held_out_pairs": len(held_out.names),
        "held_out_clusters": len(set(held_out.clusters)),
        "accuracy": {name: interval(own, held_out) for name, own in right.items()},
        "reward_model_minus": {
            name: interval(right["reward model"] - own, held_out)
            for name, own in right.items()
            if name != "reward model"
        },
        "train_rm": read_json(work / METRICS / "train_rm.json"),
        "ingest": read_json(work / METRICS / "ingest.json"),
        "params": {group: params[group] for group in ("seed", "compute", "base_model", "ingest", "train_rm")},
        "seconds": read_json(work / "seconds.json") if (work / "seconds.json").exists() else None,
        "environment": measure.environment(),
    }


def interval(x: np.ndarray, pairs: Pairs) -> list[float]:
    """Return the mean over pairs and its 95 % interval, by a bootstrap over prompts or trees."""
    seed = derive_seed(0, "benchmarks", "bootstrap")
    low, high = clustered_interval(x, pairs.clusters, seed=seed, resamples=_RESAMPLES, confidence=_CONFIDENCE)
    return [float(x.mean()), low, high]


def table(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table, in percent; a pair right = a higher score for the better response."""
    what = f"{result['pairs']} pairs to train on, {result['held_out_pairs']} held out"
    lines = [
        f"{what}, of {result['held_out_clusters']} prompts or trees\n",
        "| ranked by | right | 95 % | reward model minus it | 95 % |",
        "|---|---|---|---|---|",
    ]
    for name, (value, low, high) in result["accuracy"].items():
        cells = [name, f"{value:.1%}", f"{low:.1%} to {high:.1%}"]
        if name in result["reward_model_minus"]:
            value, low, high = result["reward_model_minus"][name]
            cells += [f"{value:+.1%}", f"{low:+.1%} to {high:+.1%}"]
        lines.append(f"| {' | '.join(cells + [''] * (5 - len(cells)))} |")
    return "\n".join(lines)


def read_json(path: Path) -> Any:
    """Read a file that a stage wrote.

    Raises:
        ConfigError: If it is not there.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; run without --report-only")
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
