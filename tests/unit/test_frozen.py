"""Rounded weights of models that only score: the same states bit by bit, or the weights stay as they are.

Mutations that must fail here: heads rounded; weights rounded without autocast; weights that something reads exactly;
what was not rounded left in the file.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_core.models.batching import collate
from rlhf_core.models.forward import token_outputs
from rlhf_core.models.frozen import round_weights
from rlhf_core.models.loading import load_causal_lm
from tests.tiny import save_tiny, tiny_model

BATCH = collate([[1, 70], [1, 71, 72]], [[80, 81, 2], [82]], range(2), pad_id=0, device=torch.device("cpu"))


def logprobs(model: Any, precision: str) -> torch.Tensor:
    with torch.inference_mode():
        return token_outputs(
            model, BATCH, temperature=0.7, logits_chunk_tokens=8, precision=precision, critic=None
        ).logprobs


def linears(model: Any) -> set[torch.dtype]:
    return {module.weight.dtype for module in model.model.modules() if isinstance(module, nn.Linear)}


def test_logprobs_stay_the_same_bit_by_bit() -> None:
    model = tiny_model().eval()
    before = logprobs(model, "bf16-autocast")
    round_weights(model, "bf16-autocast")
    assert linears(model) == {torch.bfloat16} and model.lm_head.weight.dtype == torch.float32
    assert torch.equal(logprobs(model, "bf16-autocast"), before)


def test_the_checkpoint_file_is_left(tmp_path: Path) -> None:
    # While a tensor lies in the mapped file, all pages that were read of it count as the process's memory.
    directory = save_tiny(tmp_path / "model")
    model = load_causal_lm(directory, device=torch.device("cpu"), precision="bf16-autocast")
    mapped = lambda: str(directory / "model.safetensors") in Path("/proc/self/maps").read_text(encoding="utf-8")
    before = logprobs(model, "bf16-autocast")
    assert mapped()
    round_weights(model, "bf16-autocast")
    assert not mapped()
    assert torch.equal(logprobs(model, "bf16-autocast"), before)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_another_precision_is_left_alone(precision: str) -> None:
    model = tiny_model().eval()
    round_weights(model, precision)
    assert linears(model) == {torch.float32}


def test_weights_that_something_reads_exactly_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model().eval()
    mlp: Any = model.model.layers[0].mlp
    plain = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda states: plain(states) + mlp.up_proj.weight.float().norm()[None])
    exact = [parameter.clone() for parameter in model.parameters()]
    round_weights(model, "bf16-autocast")
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), exact, strict=True))
