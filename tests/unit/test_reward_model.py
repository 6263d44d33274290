"""Reward model training and its measures, and what may be loaded as a reward model."""

import json
import math
import os
import pickle

import numpy as np
import pytest
import torch

from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.loading import fetch_base_model, load_causal_lm, load_classifier, new_classifier, save_like
from rlhf_core.training.distributed import ALONE
from rlhf_core.training.optimizer import adamw, trainable
from rlhf_core.training.reward_model import (
    Pairs,
    _accumulate,
    calibration_error,
    expand_ranks,
    freeze_lowest,
    length_baseline,
    ranking,
    scores,
    train,
)

CPU = torch.device("cpu")
QUIET = {"max_batch_tokens": 64, "precision": "float32", "pad_id": 0, "processes": ALONE}


def pairs() -> Pairs:
    """The preferred response always holds token 90 and the other one token 91."""
    rng = np.random.default_rng(0)
    noise = lambda: rng.integers(70, 89, rng.integers(1, 4)).tolist()
    rows = [([1, *noise()], [*noise(), 90, *noise(), 2], [*noise(), 91, *noise(), 2]) for _ in range(64)]
    prompts, chosen, rejected = (list(column) for column in zip(*rows, strict=True))
    return Pairs([f"q{i}" for i in range(64)], prompts, chosen, rejected, 0)


def evaluate(model) -> dict[str, float]:
    return ranking(pairs(), *scores(model, pairs(), **QUIET, progress=lambda rows: None))


def test_learns_what_the_pairs_have_in_common(tiny_dir):
    model = new_classifier(tiny_dir, device=CPU, precision="float32", seed=0)
    options = dict(
        learning_rate=1e-3,
        weight_decay=0.0,
        warmup_fraction=0.1,
        epochs=4,
        batch_size=8,
        max_grad_norm=1.0,
        adam_betas=(0.9, 0.999),
        adam_eps=1e-8,
    )
    train(model, pairs(), **options, **QUIET, seed=1, progress=lambda loss: None)
    found = evaluate(model)
    assert found["eval/accuracy"] > 0.95 and found["eval/margin_mean"] > 1 and found["eval/pairs"] == 64


def test_gradient_of_a_batch_of_pairs_does_not_depend_on_the_split(tiny_dir):
    gradients = []
    for max_batch_tokens in (1, 40, 10_000):
        model = new_classifier(tiny_dir, device=CPU, precision="float32", seed=0)
        loss = _accumulate(
            model,
            pairs(),
            list(range(7)),
            batch_size=7,
            max_batch_tokens=max_batch_tokens,
            precision="float32",
            pad_id=0,
        )
        gradients.append((loss, torch.cat([p.grad.flatten() for p in model.parameters()])))
    for loss, gradient in gradients[:2]:
        assert loss == pytest.approx(gradients[2][0], abs=1e-6)
        assert torch.allclose(gradient, gradients[2][1], atol=1e-6)


def test_save_and_load_keep_every_score(tiny_dir, tmp_path):
    model = new_classifier(tiny_dir, device=CPU, precision="float32", seed=0)
    model.config.pad_token_id = 0
    before = evaluate(model)
    save_like(model, tiny_dir, tmp_path, card="x")
    for torch_seed in (1, 2):
        torch.manual_seed(torch_seed)
        again = load_classifier(tmp_path, device=CPU, precision="float32")
        assert evaluate(again) == before


def test_a_plain_language_model_is_no_reward_model(tiny_dir):
    with pytest.raises(ModelError, match=r"score\.weight.*random"):
        load_classifier(tiny_dir, device=CPU, precision="float32")


def test_a_new_head_depends_on_the_seed_alone(tiny_dir):
    torch.manual_seed(5)
    first = new_classifier(tiny_dir, device=CPU, precision="float32", seed=0).score.weight
    torch.manual_seed(6)
    assert torch.equal(first, new_classifier(tiny_dir, device=CPU, precision="float32", seed=0).score.weight)
    assert not torch.equal(first, new_classifier(tiny_dir, device=CPU, precision="float32", seed=1).score.weight)


def test_several_labels_are_refused_by_name(tiny_dir, tmp_path):
    from transformers import AutoModelForSequenceClassification

    AutoModelForSequenceClassification.from_pretrained(tiny_dir, num_labels=10).save_pretrained(tmp_path)
    for load in (load_classifier, lambda *a, **k: new_classifier(*a, **k, seed=0)):
        with pytest.raises(ModelError, match=rf"{tmp_path}.*10 labels"):
            load(tmp_path, device=CPU, precision="float32")


def test_frozen_layers_stay_and_the_rest_moves(tiny_dir):
    model = new_classifier(tiny_dir, device=CPU, precision="float32", seed=0)
    freeze_lowest(model, 1)
    names = {name for name, _ in trainable(model, "rm")}
    assert not any(".layers.0." in name or "embed_tokens" in name for name in names)
    assert any(".layers.1." in name for name in names) and "rm.score.weight" in names
    with pytest.raises(ConfigError, match=r"frozen_layers is 3, but the model has 2 layers"):
        freeze_lowest(model, 3)


def test_ranked_lists_become_all_pairs_and_ties_are_counted():
    found = expand_ranks(["a"], [[1]], [[[10], [11], [12]]], [[1, 0, 1]])
    assert (found.chosen_ids, found.rejected_ids, found.ties) == ([[11], [11]], [[10], [12]], 1)


def test_calibration_error_by_hand():
    # Two pairs at confidence sigmoid(ln 3) = 0.75, one right: |0.5 - 0.75| = 0.25.
    assert calibration_error(np.array([math.log(3), -math.log(3)])) == pytest.approx(0.25)
    # One pair at 0.75, right (error 0.25), and one at sigmoid(0) = 0.5, a tie, not right (error 0.5): mean of both.
    assert calibration_error(np.array([math.log(3), 0.0])) == pytest.approx(0.375)


def test_length_baseline_takes_the_better_direction_and_halves_ties():
    both = Pairs(["a", "b", "c"], [[1]] * 3, [[2], [2, 2], [2]], [[3, 3], [3, 3], [3, 3, 3]], 0)
    assert length_baseline(both) == pytest.approx((1 + 0.5 + 1) / 3)  # shorter wins, tie, shorter wins


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_pickled_weights_are_refused_and_not_run(tiny_dir, tmp_path):
    marker = tmp_path / "MARK"
    directory = tmp_path / "model"
    directory.mkdir()
    for path in tiny_dir.iterdir():
        if path.suffix != ".safetensors":
            (directory / path.name).write_bytes(path.read_bytes())
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(ModelError):
        load_classifier(directory, device=CPU, precision="float32")
    with pytest.raises(ModelError):
        load_causal_lm(directory, device=CPU, precision="float32")
    with pytest.raises(ModelError, match="pickled weights"):
        fetch_base_model(str(directory), revision=None, trust_remote_code=False)
    assert not marker.exists()


def test_base_model_errors_say_what_to_do(tiny_dir, tmp_path):
    with pytest.raises(ModelError, match="no such directory"):
        fetch_base_model(str(tmp_path / "absent" / "x"), revision=None, trust_remote_code=False)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((tiny_dir / "config.json").read_text())
    with pytest.raises(ModelError, match="no usable tokenizer"):
        fetch_base_model(str(bare), revision=None, trust_remote_code=False)


def test_a_base_model_without_pad_token_gets_one_in_tokenizer_and_config(tiny_dir, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    for path in tiny_dir.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    description = json.loads((directory / "tokenizer_config.json").read_text())
    del description["pad_token"]
    (directory / "tokenizer_config.json").write_text(json.dumps(description))
    model, tokenizer = fetch_base_model(str(directory), revision=None, trust_remote_code=False)
    assert tokenizer.pad_token_id == model.config.pad_token_id == 2
    assert model.get_input_embeddings().weight.shape[0] == 266


def test_an_architecture_that_caps_its_logits_is_refused(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from rlhf_core.models.loading import check_head

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=60, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, final_logit_softcapping=0.5, initializer_range=0.5,
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"Gemma2ForCausalLM.*soft-capping"):
        check_head(Gemma2ForCausalLM(config).eval())


def test_adamw_holds_each_parameter_once(tiny_dir):
    model = new_classifier(tiny_dir, device=CPU, precision="float32", seed=0)
    named = trainable(model, "rm")
    optimizer = adamw([(named, 1e-3)], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    assert len(optimizer.param_groups[0]["params"]) == len({id(p) for _, p in named}) == len(named)
