"""ppo_update with adapters, from iteration to iteration: a chain of plain policies, and one pair of matrices a layer.

Mutations that must fail here: stored adapters not read, or not taken back from the weights; the moments lost; the base
weights trained; a policy saved with its adapters beside it; a merge into rounded weights.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.errors import ModelError
from rlhf_core.models.checkpoint import load_optimizer
from stages import init_critic, ppo_update
from tests.stages.test_ppo_update import CHECKPOINTS, metrics, scored, steps, two_updates
from tests.tiny_run import change, stage

LORA = {"lora_rank": 2, "lora_alpha": 8.0, "lora_targets": ["q_proj", "down_proj"], "learning_rate": 1e-2}
TARGETS = {f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")}


def weights(name: str) -> dict[str, torch.Tensor]:
    found = load_file(CHECKPOINTS / "policy" / name / "model.safetensors")
    return {key: tensor.float() for key, tensor in found.items()}


def stored(name: str) -> dict[str, torch.Tensor]:
    """alpha / rank * B A of every layer, from the file."""
    found = load_file(CHECKPOINTS / "optimizer" / name / "adapters.safetensors")
    layers = {key.removeprefix("policy.").split(".lora_")[0] for key in found}
    part = lambda layer, letter: found[f"policy.{layer}.lora_{letter}.default.weight"]
    return {f"{layer}.weight": 8.0 / 2 * part(layer, "B") @ part(layer, "A") for layer in layers}


def iterate(monkeypatch: pytest.MonkeyPatch, iteration: str, prev: str) -> None:
    scored(monkeypatch, iteration, prev)
    stage(ppo_update, monkeypatch, iteration, prev)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_one_low_rank_change_grows_over_the_iterations_of_a_chain(project, monkeypatch, kind):
    change("critic", kind=kind)
    change("ppo_update", **LORA)
    init_critic.main()
    for iteration, prev in (("1", "0"), ("2", "1")):
        iterate(monkeypatch, iteration, prev)
        assert float(steps(iteration)[0]["policy/ratio_error_max"]) < 1e-4
        base, after, adapters = weights("0"), weights(iteration), stored(iteration)
        assert adapters.keys() == TARGETS == {key for key in base if not torch.equal(base[key], after[key])}
        for key, product in adapters.items():
            difference = (after[key] - base[key]).numpy()
            np.testing.assert_allclose(difference, product.numpy(), atol=1e-6)
            values = np.linalg.svd(difference, compute_uv=False)
            assert values[1] > 1e-4 > 10 * values[2]
    assert any(not torch.equal(stored("1")[key], stored("2")[key]) for key in TARGETS)
    state = load_optimizer(CHECKPOINTS / "optimizer/2")
    assert state.steps["policy"] == 8 and len(state.adapters) == 2 * len(TARGETS)
    assert {name for name in state.first_moments if name.startswith("policy.")} == state.adapters.keys()
    assert not [path for path in (CHECKPOINTS / "policy/2").iterdir() if "adapter" in path.name]
    assert "| lora_rank | 2 |" in (CHECKPOINTS / "policy/2/README.md").read_text()


def test_two_iterations_on_the_same_data_are_one_of_twice_the_epochs(project, monkeypatch):
    # The steps are so small that the second iteration's ratios start where those of the second epoch are, near 1. Then
    # matrices, moments and step counts handed on whole must give the same second step.
    change("ppo_update", **LORA | {"learning_rate": 1e-6, "minibatch_size": 6, "ppo_epochs": 2})
    scored(monkeypatch)
    stage(ppo_update, monkeypatch, "1", "0")
    whole = stored("1")
    change("ppo_update", ppo_epochs=1)
    stage(ppo_update, monkeypatch, "1", "0")
    iterate(monkeypatch, "2", "1")
    for key, product in stored("2").items():
        np.testing.assert_allclose(product.numpy(), whole[key].numpy(), rtol=2e-2, atol=1e-9)


def test_rounded_weights_are_trained_beside_and_never_published(project, monkeypatch):
    change("compute", precision="bfloat16")
    change("ppo_update", **LORA | {"learning_rate": 1e-5})
    iterate(monkeypatch, "1", "0")
    base, after = weights("0"), weights("1")
    # Steps of 1e-5 are far below what bfloat16 resolves in weights near 0.2.
    assert {key for key in base if not torch.equal(base[key], after[key])} == TARGETS
    for key, product in stored("1").items():
        np.testing.assert_allclose((after[key] - base[key]).numpy(), product.numpy(), atol=1e-7)
    assert load_file(CHECKPOINTS / "policy/1/model.safetensors")["model.norm.weight"].dtype == torch.float32


def test_warm_up_leaves_policy_and_adapters(project, monkeypatch):
    change("ppo_update", **LORA, critic_warmup_iterations=1)
    iterate(monkeypatch, "1", "0")
    assert not load_optimizer(CHECKPOINTS / "optimizer/1").adapters
    iterate(monkeypatch, "2", "1")
    assert stored("2").keys() == TARGETS and load_optimizer(CHECKPOINTS / "optimizer/2").steps["policy"] == 4


def test_the_stage_writes_the_same_bytes_twice(project, monkeypatch):
    change("ppo_update", **LORA)
    first, second = two_updates(monkeypatch)
    assert first == second


def test_target_kl_stops_an_update_with_adapters(project, monkeypatch):
    change("ppo_update", **LORA, target_kl=1e-6)
    iterate(monkeypatch, "1", "0")
    assert metrics()["update/stopped_early"] == 1
    assert load_optimizer(CHECKPOINTS / "optimizer/1").steps["policy"] == metrics()["optimizer_steps"] < 4


@pytest.mark.parametrize("second", [{"lora_rank": 3}, {"lora_targets": ["q_proj"]}])
def test_other_adapters_than_the_chain_s_are_refused(project, monkeypatch, second):
    change("ppo_update", **LORA)
    iterate(monkeypatch, "1", "0")
    change("ppo_update", **second)
    with pytest.raises(ModelError, match="may not change within a chain"):
        iterate(monkeypatch, "2", "1")


def test_adapters_after_full_training_and_the_contrary_are_refused(project, monkeypatch):
    iterate(monkeypatch, "1", "0")
    change("ppo_update", **LORA)
    with pytest.raises(ModelError, match="trained with 0 adapter matrices"):
        iterate(monkeypatch, "2", "1")
    stage(ppo_update, monkeypatch, "1", "0")
    change("ppo_update", lora_rank=0)
    with pytest.raises(ModelError, match="state is for other parameters"):
        iterate(monkeypatch, "2", "1")
