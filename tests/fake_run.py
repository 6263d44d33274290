"""A finished run that never ran: every artifact and metric file of a few iterations, made up, small, without a model.

Numbers move as in a run that learns. Texts hold what breaks naive viewers: markup, terminal escapes, empty responses.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rlhf_core.artifacts.provenance import hash_tokenizer
from rlhf_core.artifacts.schema import (
    PREFERENCES,
    PROMPTS,
    ROLLOUTS,
    advantages_schema,
    evaluations_schema,
    scores_schema,
)
from rlhf_core.artifacts.shards import shard_name, write_shard

PROJECT = Path(__file__).parents[1]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]  # ids 0..4; bytes follow
EOS = 2
TOPICS = ["a rainy morning", "the first day of school", "an old bicycle", "bread", "the sea in winter", "a lost key"]
GOOD = [
    "It is a lovely, calm and joyful thing to remember.",
    "What a wonderful surprise, I love it!",
    "Everyone was happy and warm.",
]
BAD = ["It was terrible and", "Nobody liked the awful noise of", "It is a thing that"]
NASTY = '<script>alert("x")</script>\x1b[31mred\x1b[0m \u202eesrever'


def tokenizer() -> Tokenizer:
    """One token for each byte, and five special ones."""
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


def three_iterations() -> str:
    """The shipped iterations.yaml, comments included, with three iterations however many it ships with."""
    head, mark, _ = (PROJECT / "iterations.yaml").read_text().partition("iterations:\n")
    entry = '  "{}": {{prev: "{}", rollout: {{}}, score: {{}}, advantages: {{}}, ppo_update: {{}}}}\n'
    return head + mark + "".join(entry.format(step, step - 1) for step in (1, 2, 3))


def build(
    root: Path, *, prompts: int = 12, samples: int = 2, overrides: dict[str, dict[str, Any]] | None = None
) -> Path:
    """Write a project with three iterations that lacks only its models, and return its root.

    Args:
        root: An empty or missing directory.
        prompts: Prompts of training and, as many, of evaluation.
        samples: Responses a prompt.
        overrides: Stage and iteration, such as "score/3", -> metrics that replace the made-up ones.
    """
    root.mkdir(parents=True, exist_ok=True)
    shutil.copy(PROJECT / "params.yaml", root / "params.yaml")
    (root / "iterations.yaml").write_text(three_iterations())
    directory = root / "data/checkpoints/policy/0"
    directory.mkdir(parents=True)
    words = tokenizer()
    words.save(str(directory / "tokenizer.json"))
    common = {"inputs": {"data/prompts": "a1" * 32}, "tokenizer": hash_tokenizer(directory)}
    train, held_out = _prompts(words, prompts, "train"), _prompts(words, prompts, "eval")
    _write(root / "data/prompts", train + held_out, PROMPTS, {**common, "stage": "ingest"})
    _write(root / "data/preferences", _pairs(words, prompts), PREFERENCES, {**common, "stage": "ingest"})
    _metrics(root, "train_rm", None, _reward_model_metrics())
    _metrics(root, "ingest", None, {"prompts/train": prompts, "prompts/eval": prompts})
    scored = scores_schema(["reward_model"])
    for step in range(4):
        key = str(step)
        meta = {**common, "iteration": key, "temperature": 0.7, "policy": f"{step:02x}" * 32, "vllm": "0.32.0"}
        evaluated = [_evaluated(row, step) for row in _rows(words, held_out, key, step, samples)]
        _write(
            root / f"data/evaluations/iteration={key}",
            evaluated,
            evaluations_schema(["judge"]),
            {**meta, "stage": "evaluate"},
        )
        judge = [row["score"] for row in evaluated]
        proxy = [row["reward_model_score"] for row in evaluated]
        kl = [sum(row["logprobs"]) - sum(row["ref_logprobs"]) for row in evaluated]
        _metrics(
            root,
            "evaluate",
            key,
            {
                "eval/score_mean": float(np.mean(judge)),
                "eval/score_std": float(np.std(judge)),
                "eval/score_judge_mean": float(np.mean(judge)),
                "eval/score_judge_std": float(np.std(judge)),
                "eval/reward_model_mean": float(np.mean(proxy)),
                "eval/kl": float(np.mean(kl)),
                "eval/finished": float(np.mean([row["finish_reason"] == "stop" for row in evaluated])),
                "eval/response_length_mean": float(np.mean([len(row["response_ids"]) for row in evaluated])),
                "eval/responses": len(evaluated),
                "eval/prompts": prompts,
            },
        )
        if step == 0:
            continue
        # An iteration samples from the policy before it.
        rows = _rows(words, train, key, step - 1, samples)
        _write(root / f"data/rollouts/iteration={key}", rows, ROLLOUTS, {**meta, "stage": "rollout"}, shards=2)
        rows = [_scored(row, step - 1) for row in rows]
        _write(root / f"data/scores/iteration={key}", rows, scored, {**meta, "stage": "score"}, shards=2)
        rows = [_with_advantages(row) for row in rows]
        _write(
            root / f"data/advantages/iteration={key}",
            rows,
            advantages_schema(scored),
            {**meta, "stage": "advantages"},
            shards=2,
        )
        for stage, content in _iteration_metrics(step).items():
            _metrics(root, stage, key, content)
    for name, content in (overrides or {}).items():
        path = root / f"data/metrics/{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    return root


def _prompts(words: Tokenizer, count: int, split: str) -> list[dict[str, Any]]:
    rows = []
    for index in range(count):
        question = f"Write one short sentence about {TOPICS[index % len(TOPICS)]}, number {index}."
        text = (
            f"<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        rows.append(
            {
                "prompt_id": f"{split}{index:03d}",
                "messages": [{"role": "user", "content": question}],
                "prompt": text,
                "prompt_ids": words.encode(text).ids,
                "ground_truth": None,
                "source": "prompts.jsonl",
                "split": split,
            }
        )
    return rows


def _pairs(words: Tokenizer, count: int) -> list[dict[str, Any]]:
    rows = []
    for index in range(count):
        responses = [GOOD[index % 3], BAD[index % 3]]
        rows.append(
            {
                "pair_id": f"pair{index:03d}",
                "messages": None,
                "prompt": "Say something.",
                "prompt_ids": words.encode("Say something.").ids,
                "responses": responses,
                "response_ids": [[*words.encode(text).ids, EOS] for text in responses],
                "ranks": [0, 1],
                "margin": 0.5 + index / 10,
                "source": "preferences.jsonl",
                "split": "eval" if index % 4 == 0 else "train",
            }
        )
    return rows


def _rows(words: Tokenizer, prompts: list[dict[str, Any]], key: str, step: int, samples: int) -> list[dict[str, Any]]:
    """Responses of the policy after `step` updates: the later, the more good ones."""
    rows = []
    for number, prompt in enumerate(prompts):
        for sample in range(samples):
            draw = np.random.default_rng([step, number, sample]).random()
            good = draw < 0.3 + 0.2 * step
            text = (GOOD if good else BAD)[(number + sample) % 3]
            if number == 1 and sample == 0:
                text = NASTY
            if number == 2 and sample == 0 and step == 0:
                text = ""
            ids = [] if text == "" else [*words.encode(text).ids, *([EOS] if good else [])]
            rows.append(
                {
                    "sample_id": f"{key}-{prompt['prompt_id']}-{sample}",
                    "prompt_id": prompt["prompt_id"],
                    "sample_index": sample,
                    "prompt": prompt["prompt"],
                    "prompt_ids": prompt["prompt_ids"],
                    "response": text,
                    "response_ids": ids,
                    "sampler_logprobs": [-0.5 - 0.01 * (place % 7) for place in range(len(ids))],
                    "finish_reason": "stop" if good else "length",
                    "ground_truth": None,
                }
            )
    return rows


def _logprobs(row: dict[str, Any], step: int) -> dict[str, Any]:
    policy = row["sampler_logprobs"]
    return {"logprobs": policy, "ref_logprobs": [value - 0.03 * step for value in policy]}


def _evaluated(row: dict[str, Any], step: int) -> dict[str, Any]:
    good = row["finish_reason"] == "stop"
    spread = np.random.default_rng([7, step, len(row["response_ids"]), row["sample_index"]]).normal() * 0.1
    judge = (0.6 if good else -0.7) + spread
    scores = {"score_judge": judge, "score": judge, "reward_model_score": 2 * judge + 0.4 * step}
    return {**row, **_logprobs(row, step), **scores}


def _scored(row: dict[str, Any], step: int) -> dict[str, Any]:
    score = (1.0 if row["finish_reason"] == "stop" else -1.0) + 0.01 * row["sample_index"]
    values = [0.1 * score] * len(row["response_ids"])
    critic = {"values": values, "bootstrap_value": 0.1 * score}
    return {**row, **_logprobs(row, step), **critic, "score_reward_model": score, "score": score}


def _with_advantages(row: dict[str, Any]) -> dict[str, Any]:
    length = len(row["response_ids"])
    rewards = [-0.05 * (new - ref) for new, ref in zip(row["logprobs"], row["ref_logprobs"], strict=True)]
    if rewards:
        rewards[-1] += row["score"]
    return {
        **row,
        "importance_weights": [1.0] * length,
        "rewards": rewards,
        "advantages": [row["score"] - 0.01 * place for place in range(length)],
        "returns": [row["score"]] * length,
        "bootstrap_return": None,
    }


def _iteration_metrics(step: int) -> dict[str, dict[str, float]]:
    at = step - 1
    return {
        "rollout": {
            "rollout/responses": 24,
            "rollout/tokens": 800,
            "rollout/empty_responses": 0,
            "rollout/finished": 0.4 + 0.1 * at,
            "rollout/response_length_mean": 33.0,
            "dropped/prompt_too_long": 0,
        },
        "score": {
            "objective/kl": 1.6 * at,
            "objective/entropy": 30.0 * 0.95**at,
            "objective/scores": -0.3 + 0.4 * at,
            "objective/scores_std": 0.5,
            "score/reward_model_mean": -0.3 + 0.4 * at,
            "score/reward_model_std": 0.5,
            "mismatch/k1": 1e-7,
            "mismatch/k3": 2e-10,
            "mismatch/max_abs": 6e-5,
            "mismatch/mean_abs": 5e-6,
            "mismatch/clip_fraction": 0.0,
            "mismatch/ess": 1.0,
            "val/num_eos_tokens": 12,
            "score/responses": 256,
        },
        "advantages": {
            "objective/non_score_reward": -0.08 * at,
            "objective/rlhf_reward": -0.3 + 0.3 * at,
            "objective/scores_final": -0.8 + 0.4 * at,
            "advantages/mean": 0.02,
            "advantages/std": 0.6,
            "returns/mean": 0.1,
            "returns/std": 0.7,
            "values/mean": 0.05,
            "val/explained_variance": -0.2 + 0.25 * at,
            "advantages/tokens": 800,
            "advantages/empty_responses": 0,
        },
        "ppo_update": {
            "policy/approxkl_avg": 0.02,
            "policy/approxkl_k3_avg": 0.02,
            "policy/clipfrac_avg": 0.12 + 0.03 * at,
            "policy/entropy_avg": 0.9,
            "loss/policy_avg": -0.03,
            "loss/value_avg": 0.4 - 0.1 * at,
            "val/clipfrac_avg": 0.05,
            "val/ratio": 1.01,
            "val/ratio_var": 0.03,
            "policy/max_first_ratio_error": 1e-6,
            "grad_norm_avg": 1.2,
            "lr": 1e-5,
            "optimizer_steps": 16,
            "episode": 256 * step,
            "val/explained_variance_after": 0.1 + 0.2 * at,
        },
    }


def _reward_model_metrics() -> dict[str, float]:
    return {
        "eval/accuracy": 0.81,
        "eval/accuracy_ties_half": 0.81,
        "eval/ties": 0,
        "eval/margin_mean": 1.1,
        "eval/loss": 0.45,
        "eval/calibration_error": 0.04,
        "eval/length_baseline_accuracy": 0.58,
        "eval/accuracy_low": 0.75,
        "eval/accuracy_high": 0.86,
        "eval/pairs": 200,
        "train/loss": 0.4,
        "train/pairs": 800,
        "dropped/identical_after_truncation": 0,
    }


def _metrics(root: Path, stage: str, key: str | None, content: dict[str, float]) -> None:
    path = root / "data/metrics" / (f"{stage}.json" if key is None else f"{stage}/{key}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _write(
    directory: Path, rows: list[dict[str, Any]], schema: pa.Schema, metadata: dict[str, Any], shards: int = 1
) -> None:
    size = -(-len(rows) // shards)
    for index in range(shards):
        part = pa.Table.from_pylist(rows[index * size : (index + 1) * size], schema=schema)
        write_shard(directory / shard_name(index), part, schema, metadata)
