"""The embedded SmolLM2 through the stages' own code: vLLM's logprobs against ours and against transformers'."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_core.artifacts.schema import PROMPTS
from rlhf_core.artifacts.shards import read_table, shard_name, write_shard
from rlhf_core.ingest.chat import prompt_ids
from rlhf_core.models.batching import collate
from rlhf_core.models.forward import token_outputs
from rlhf_core.models.loading import load_causal_lm
from rlhf_core.models.tokenizer import eos_ids, load_tokenizer
from rlhf_core.sampling.evaluation import sample_held_out
from stages import base_model

TEMPERATURE = 0.7

pytestmark = pytest.mark.vllm


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the project's own parameters, and its base model made by the stage."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    for name in ("params.yaml", "iterations.yaml"):
        Path(name).write_text((root / name).read_text())
    base_model.main()
    return tmp_path


def test_logprobs_of_vllm_and_ours_agree_in_float32_on_a_real_model(project: Path) -> None:
    import pyarrow as pa

    policy = Path("data/checkpoints/policy/0")
    tokenizer = load_tokenizer(policy)
    rows = []
    for index, topic in enumerate(("the sea", "bread", "an old bicycle")):
        messages = [{"role": "user", "content": f"Write one short sentence about {topic}."}]
        text, ids = prompt_ids(tokenizer, messages, special_tokens_in_text="error")
        rows.append(
            {
                "prompt_id": f"p{index}",
                "messages": messages,
                "prompt": text,
                "prompt_ids": ids,
                "ground_truth": None,
                "source": "made",
                "split": "eval",
            }
        )
    write_shard(Path("prompts") / shard_name(0), pa.Table.from_pylist(rows, schema=PROMPTS), PROMPTS, {})
    sample_held_out(
        Path("prompts"),
        policy,
        Path("samples"),
        {"iteration": "0", "eos_ids": eos_ids(policy, tokenizer)},
        max_prompts=None,
        samples_per_prompt=2,
        temperature=TEMPERATURE,
        max_new_tokens=24,
        seed=0,
        dtype="float32",
        max_model_len=256,
        kv_cache_gib=0.5,
        gpu_memory_utilization=0.85,
        tensor_parallel_size=1,
        nonfinite_logprobs="error",
    )
    table = read_table(Path("samples")).to_pylist()
    assert len(table) == 6 and sum(len(row["response_ids"]) for row in table) > 40
    prompts, responses = ([row[name] for row in table] for name in ("prompt_ids", "response_ids"))
    sampled = torch.tensor([value for row in table for value in row["sampler_logprobs"]])

    ours = load_causal_lm(policy, device=torch.device("cpu"), precision="float32")
    batch = collate(prompts, responses, range(6), pad_id=2, device=torch.device("cpu"))
    with torch.no_grad():
        found = token_outputs(
            ours, batch, temperature=TEMPERATURE, logits_chunk_tokens=16, precision="float32", critic=None
        ).logprobs
    assert (found - sampled).abs().max() < 1e-4

    plain = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        logits = plain(torch.tensor([prompts[0] + responses[0]])).logits[0, len(prompts[0]) - 1 : -1] / TEMPERATURE
    expected = torch.log_softmax(logits, -1)[range(len(responses[0])), responses[0]]
    assert (found[: len(expected)] - expected).abs().max() < 1e-4
