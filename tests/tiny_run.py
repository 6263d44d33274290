"""A run of the tiny model up to its first rollouts, made without vLLM: what tests of later stages start from.

Every function works in the current directory.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
import torch
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM

from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.artifacts.schema import PREFERENCES, ROLLOUTS
from rlhf_core.artifacts.shards import shard_name, write_shard
from rlhf_core.models.loading import save_like
from stages import base_model, init_critic, train_rm

ROOT = Path(__file__).parents[1]
POLICY = Path("data/checkpoints/policy")
PROMPT = [1, 3, 89, 70, 4, 3, 69]
RESPONSES = [
    [80, 81, 2],
    [82, 83, 84, 85],
    [],
    [86, 4],
    [87, 88, 89, 90, 91, 2],
    [92],
]  # two end themselves, one is empty
ITERATIONS = """\
iterations:
  "1": {prev: "0", rollout: {}, score: {}, advantages: {}, ppo_update: {}}
  "2": {prev: "1", rollout: {}, score: {}, advantages: {}, ppo_update: {}}
"""


def build(model: Path) -> None:
    """Write parameters, base model, preferences, reward model, critic and the rollouts of iteration 1.

    Args:
        model: Of tests/tiny.py.
    """
    yaml = YAML()
    params = yaml.load((ROOT / "params.yaml").read_text())
    params["base_model"]["source"] = str(model)
    params["compute"] |= {"precision": "float32", "max_batch_tokens": 40}
    params["train_rm"] |= {"frozen_layers": 0, "batch_size": 4}
    params["rollout"] |= {"prompts_per_iteration": 3, "samples_per_prompt": 2}
    params["ppo_update"] |= {"minibatch_size": 3, "ppo_epochs": 2, "learning_rate": 1e-3}
    yaml.dump(params, Path("params.yaml"))
    Path("iterations.yaml").write_text(ITERATIONS)
    for name in ("raw/prompts.jsonl", "raw/preferences.jsonl"):
        path = Path("data") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
    base_model.main()
    write_preferences()
    train_rm.main()
    init_critic.main()
    write_rollouts()


def write_preferences() -> None:
    """Sixteen pairs that differ in their first token."""
    rows = [
        {
            "pair_id": f"q{index}",
            "messages": None,
            "prompt": "p",
            "prompt_ids": PROMPT,
            "responses": ["a", "b"],
            "response_ids": [[90, 70 + index, 2], [91, 70 + index, 2]],
            "ranks": [0, 1],
            "margin": None,
            "source": "made",
            "split": "eval" if index % 4 == 3 else "train",
        }
        for index in range(16)
    ]
    table = pa.Table.from_pylist(rows, schema=PREFERENCES)
    metadata = {"stage": "ingest", "tokenizer": hash_tokenizer(POLICY / "0")}
    write_shard(Path("data/preferences") / shard_name(0), table, PREFERENCES, metadata)


def policy_logprobs(policy: Path, response: list[int], temperature: float = 0.7) -> list[float]:
    """The model's own log-softmax, without our forward pass."""
    if not response:
        return []
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + response])).logits[0, len(PROMPT) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1)[range(len(response)), response].tolist()


def write_rollouts(
    iteration: str = "1",
    prev: str = "0",
    *,
    shift: dict[int, float] | None = None,
    empty: bool = False,
    facts: dict[str, Any] | None = None,
) -> None:
    """Write RESPONSES as what policy `prev` sampled, three rows in each of two shards.

    Args:
        iteration: Whose rollouts.
        prev: Their policy.
        shift: Row -> nats added to what the sampler claims of its tokens.
        empty: Write one shard without rows instead.
        facts: Metadata that differ.
    """
    policy = POLICY / prev
    metadata = {
        "stage": "rollout", "iteration": iteration, "inputs": {}, "temperature": 0.7, "eos_ids": [2, 4], "vllm": "0",
        "tokenizer": hash_tokenizer(policy), "policy": hash_path(policy), "logprobs_mode": "processed_logprobs",
        "sampling": {"max_new_tokens": 40}, **(facts or {}),
    }  # fmt: skip
    rows = [
        {
            "sample_id": f"{iteration}-p{index // 2}-{index % 2}",
            "prompt_id": f"p{index // 2}",
            "sample_index": index % 2,
            "prompt": "p",
            "prompt_ids": PROMPT,
            "response": "text",
            "response_ids": RESPONSES[index],
            "sampler_logprobs": [x + (shift or {}).get(index, 0.0) for x in policy_logprobs(policy, RESPONSES[index])],
            "finish_reason": "stop" if RESPONSES[index][-1:] in ([2], [4]) else "length",
            "ground_truth": None,
        }
        for index in range(0 if empty else len(RESPONSES))
    ]
    for shard in range(1 if empty else 2):
        table = pa.Table.from_pylist(rows[3 * shard : 3 * shard + 3], schema=ROLLOUTS)
        write_shard(Path(f"data/rollouts/iteration={iteration}") / shard_name(shard), table, ROLLOUTS, metadata)


def write_policy(name: str, *, noise: float) -> None:
    """Write a policy that is policy 0 with noise on its weights, as an update would leave it."""
    model = AutoModelForCausalLM.from_pretrained(POLICY / "0", dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * torch.randn_like(weight))
    save_like(model, POLICY / "0", POLICY / name, card="")


def stage(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run a stage's main with these arguments."""
    monkeypatch.setattr(sys, "argv", ["stage", *arguments])
    module.main()


def set_rewards(**sources: dict[str, Any]) -> None:
    """Replace the reward sources; those without a weight get 1."""
    yaml = YAML()
    params = yaml.load(Path("params.yaml").read_text())
    params["rewards"] = {name: {"weight": 1.0, **source} for name, source in sources.items()}
    yaml.dump(params, Path("params.yaml"))


def change(section: str, **values: Any) -> None:
    """Change parameters of one section."""
    yaml = YAML()
    params = yaml.load(Path("params.yaml").read_text())
    params[section] |= values
    yaml.dump(params, Path("params.yaml"))
