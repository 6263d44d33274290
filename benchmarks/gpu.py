"""Score and update on one GPU, with Llamas of random weights: `python -m benchmarks.gpu`, no downloads, no vLLM.

For each size: tokens per second of scoring passes and of the PPO update, the share of the device's arithmetic that they
use, and peak memory, in bf16-autocast. Then, in float32, logprobs and the gradient of one update beside those of the
CPU; a difference beyond rounding ends the run. Without a GPU the same runs on the CPU: --sizes tiny.
"""

import argparse
import copy
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import cases, measure
from benchmarks.ppo_update import NEW, chosen, learner_of, scored, settings_of
from rlhf_core.models.loading import torch_device
from rlhf_core.models.memory import keep_freed_memory
from rlhf_core.training.distributed import ALONE
from rlhf_core.training.learner import Learner
from rlhf_core.training.ppo import update
from rlhf_core.training.ppo_loss import Settings
from rlhf_core.training.responses import Responses

# hidden, intermediate, layers, heads, key-value heads, vocabulary: the last two as Qwen2.5 of that size.
SIZES = {
    "tiny": (64, 128, 2, 2, 2, 500),
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
}
# Dense bfloat16 TFLOP/s that the makers give, by a word of the device's name.
PEAKS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40": 181.0, "L4": 121.0, "4090": 165.0}
LOGPROB_BOUND = 1e-3  # nats, float32 here against float32 there
GRADIENT_BOUND = 1e-2  # of its norm
CHECKED = 2  # rows


@dataclass(frozen=True)
class Run:
    """Seconds and tokens of something, and the device's peak memory meanwhile; None on a CPU."""

    seconds: float
    tokens: int
    peak_bytes: int | None


def main() -> None:
    """Measure and check each size, print the table, write the result; exit code 1 where numbers differ."""
    arguments = parsed()
    keep_freed_memory()
    device = torch_device("auto")
    results = {size: measured(size, device, arguments) for size in arguments.sizes}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else measure.cpu_model()
    print(tables(results, f"{name}: {arguments.responses} responses of up to {arguments.max_new_tokens} tokens"))
    print(f"\n{measure.written('gpu', {'device': name, 'sizes': results}, arguments.json)}")
    wrong = [size for size, result in results.items() if not result["agrees"]]
    if wrong:
        sys.exit(f"numbers differ from float32 on the CPU: {', '.join(wrong)}")


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["0.5B", "1.5B"], choices=SIZES)
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--max-batch-tokens", type=int, default=16384)
    parser.add_argument("--logits-chunk-tokens", type=int, default=2048)
    parser.add_argument("--peak-tflops", type=float, help="of the device in bfloat16, where its name does not tell")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.set_defaults(precision="bf16-autocast", template_tokens=0, samples_per_prompt=1)
    return parser.parse_args()


def measured(size: str, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one size, and whether its numbers are those of the CPU."""
    policy = new_policy(size, device)
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    rows = cases.made_up_rows(arguments, policy.config.vocab_size)
    settings = settings_of(arguments)
    checks = checked(policy, rows, arguments)
    learner = learner_of(policy)
    responses = scored(learner, rows, settings)  # warm
    scoring = timed(lambda: scored(learner, rows, settings), rows, device)
    update(learner, chosen(responses, list(range(CHECKED))), settings, ALONE, lambda metrics: None, None)
    updating = timed(lambda: update(learner, responses, settings, ALONE, lambda metrics: None, None), rows, device)
    peak = arguments.peak_tflops or peak_tflops(device)
    return {
        "parameters": parameters,
        **{
            name: {
                "tokens_per_second": run.tokens / run.seconds,
                "peak_bytes": run.peak_bytes,
                "flops_utilisation": flops * parameters * run.tokens / run.seconds / (peak * 1e12) if peak else None,
            }
            for name, run, flops in (("score", scoring, 2), ("ppo_update", updating, 6))
        },
        **checks,
    }


def new_policy(size: str, device: torch.device) -> Any:
    """Return a Llama with random float32 weights."""
    hidden, intermediate, layers, heads, key_value_heads, vocabulary = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).eval()


def timed(run: Any, rows: cases.Rows, device: torch.device) -> Run:
    """Run once and return what it took."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Run(seconds, sum(rows.lengths), peak)


def peak_tflops(device: torch.device) -> float | None:
    """Return what the device can do in bfloat16; None where its name does not tell."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for word, peak in PEAKS.items() if word in name), None)


def checked(policy: Any, rows: cases.Rows, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how far logprobs and the gradient of one update in float32 are from those of a copy on the CPU."""
    few = cases.Rows(rows.prompts[:CHECKED], [response[:64] for response in rows.responses[:CHECKED]])
    settings = settings_of(argparse.Namespace(**{**vars(arguments), "precision": "float32"}))
    here, there = learner_of(copy.deepcopy(policy)), learner_of(copy.deepcopy(policy).cpu())
    responses = scored(there, few, settings)
    found = scored(here, few, settings)
    logprobs = max(float(abs(a - b).max()) for a, b in zip(found.logprobs, responses.logprobs, strict=True))
    expected, gradient = (gradient_of(learner, responses, settings) for learner in (there, here))
    distance = float((gradient - expected).norm() / expected.norm())
    return {
        "logprob_difference": logprobs,
        "gradient_difference": distance,
        "agrees": logprobs < LOGPROB_BOUND and distance < GRADIENT_BOUND,
    }


def gradient_of(learner: Learner, responses: Responses, settings: Settings) -> torch.Tensor:
    """Return the policy's gradient in one update, as AdamW saw it: its first moment is then 0.1 times the gradient."""
    update(learner, responses, settings, ALONE, lambda metrics: None, None)
    moments = learner.state(NEW, steps=1, episode=0).first_moments
    return torch.cat([moment.flatten().cpu() for name, moment in moments.items() if name.startswith("policy")])


def tables(results: dict[str, Any], title: str) -> str:
    """Return the results for people."""
    rows = []
    for size, result in results.items():
        for name in ("score", "ppo_update"):
            facts = result[name]
            share, peak = facts["flops_utilisation"], facts["peak_bytes"]
            rows.append(
                [
                    f"{size} {name}",
                    f"{facts['tokens_per_second']:.4g}",
                    "" if share is None else f"{share:.1%}",
                    "" if peak is None else f"{peak / 2**30:.1f}",
                ]
            )
    checks = [
        [size, f"{result['logprob_difference']:.2g}", f"{result['gradient_difference']:.2g}", result["agrees"]]
        for size, result in results.items()
    ]
    return measure.table(title, ["", "tokens a second", "FLOPs utilisation", "peak GiB"], rows) + measure.table(
        "\nfloat32 beside the CPU", ["", "logprobs, nats", "gradient, of its norm", "agrees"], checks
    )


if __name__ == "__main__":
    main()
