"""What benchmarks of model passes share: a model, made-up rows, contenders as processes that take turns."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import measure
from rlhf_core.models.loading import EMBEDDED, fetch_base_model, save_pretrained
from rlhf_core.stage import write_json

Facts = dict[str, Any]  # what a contender noted


@dataclass(frozen=True)
class Rows:
    """Made-up token ids: prompts about as long as each other, responses of very different lengths."""

    prompts: list[list[int]]
    responses: list[list[int]]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(prompt) + len(response) for prompt, response in zip(self.prompts, self.responses, strict=True)]


def made_up_rows(arguments: argparse.Namespace, vocabulary: int) -> Rows:
    """Return rows with prompts of 0.75 to 1.25 times their usual length and responses of any length up to the limit.

    Args:
        arguments: From parsed.
        vocabulary: Token ids are below it.
    """
    count, samples, usual = arguments.responses, arguments.samples_per_prompt, arguments.prompt_tokens
    generator = np.random.default_rng(0)

    def ids(lengths: np.ndarray) -> list[list[int]]:
        return [generator.integers(0, vocabulary, length).tolist() for length in lengths]

    around = max(usual // 4, 1)
    prompts = ids(generator.integers(usual - around, usual + around, -(-count // samples)))
    template = ids(np.array([arguments.template_tokens]))[0]
    return Rows(
        [template + prompt[len(template) :] for prompt in prompts for _ in range(samples)][:count],
        ids(generator.integers(1, arguments.max_new_tokens + 1, count)),
    )


def model_directory(source: str) -> Path:
    """Return a directory with a model: the one named, or the embedded one, unpacked once."""
    if source != EMBEDDED:
        return Path(source).resolve()
    directory = measure.RESULTS / "models" / EMBEDDED
    if not directory.is_dir():
        model, tokenizer = fetch_base_model(EMBEDDED, revision=None, trust_remote_code=False)
        save_pretrained(model, tokenizer, directory, card="# The embedded model\n")
    return directory


def parsed(module: str, description: str | None, *, responses: int) -> argparse.Namespace:
    """Read the command line of a benchmark of model passes.

    Args:
        module: Such as benchmarks.score.
        description: Its docstring.
        responses: How many there are unless told.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=EMBEDDED, help="a directory; default: the model of the demo")
    parser.add_argument("--responses", type=int, default=responses)
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--template-tokens", type=int, default=0, help="of a prompt, with which all begin")
    parser.add_argument("--samples-per-prompt", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--precision", default="bf16-autocast", choices=["float32", "bf16-autocast", "bfloat16"])
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--logits-chunk-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--work", type=Path, help="scratch directory")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # run this contender, in this process
    return parser.parse_args()


def take_turns(
    module: str, contenders: Sequence[str], arguments: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Run each contender as a process of its own, round after round, and return what they noted.

    Args:
        module: Whose main runs one contender with --only and writes with `note`.
        contenders: Their names.
        arguments: From parsed; passed on.
    """
    given = {**vars(arguments), "model": str(model_directory(arguments.model))}
    passed = [
        text
        for name, value in given.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
        if value is not None and name not in ("only", "json", "work", "repeats")
    ]
    found: dict[str, list[Facts]] = {name: [] for name in contenders}
    with TemporaryDirectory() as scratch:
        note = Path(scratch) / "note.json"
        for _ in range(arguments.repeats):
            for name in contenders:
                own = ["--only", name, "--json", str(note), "--work", scratch]
                done = measure.child(module, *passed, *own, cwd=measure.ROOT)
                found[name].append({**json.loads(note.read_text(encoding="utf-8")), "peak_bytes": done.peak_bytes})
    return found


def note(arguments: argparse.Namespace, **facts: Any) -> None:
    """Write what a contender found, for take_turns."""
    write_json(arguments.json, facts)


def compared(found: dict[str, list[Facts]], bare: str) -> dict[str, Any]:
    """Return speed, memory and, beside the bare contender, the ratio of each contender; for a result file."""
    seconds = {name: [turn["seconds"] for turn in turns] for name, turns in found.items()}
    return {
        name: {
            "tokens_per_second": asdict(measure.spread([turn["tokens"] / turn["seconds"] for turn in turns])),
            "speed_of_bare": asdict(measure.ratio(seconds, bare, name)),
            "peak_bytes": asdict(measure.spread([turn["peak_bytes"] for turn in turns])),
        }
        for name, turns in found.items()
    }


def comparison_table(title: str, result: dict[str, Any]) -> str:
    """Return what `compared` gave as a table."""
    rows = [
        [
            name,
            measure.Spread(**facts["tokens_per_second"]).text(),
            measure.Spread(**facts["speed_of_bare"]).text(),
            f"{facts['peak_bytes']['median'] / 2**20:.0f}",
        ]
        for name, facts in result.items()
    ]
    return measure.table(title, ["", "tokens a second", "speed of bare", "peak MiB"], rows)
