"""Reward model training and its measures, and what may be loaded as a reward model."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.loading import fetch_base_model, load_classifier, new_classifier, save_like
from rlhf_core.training.comparisons import Ranked, all_pairs, whole_lists
from rlhf_core.training.distributed import ALONE
from rlhf_core.training.optimizer import adamw, trainable
from rlhf_core.training.ranking import ranking
from rlhf_core.training.reward_model import (
    Execution,
    Objective,
    Trained,
    accumulate,
    freeze_lowest,
    list_losses,
    scores,
    train,
)
from tests.tiny_encoder import save_encoder

CPU = torch.device("cpu")
QUIET = Execution(max_batch_tokens=64, precision="float32", pad_id=0, processes=ALONE)
PAIRS = Objective("pairs", margin_coef=0.0, label_smoothing=0.0, soft_labels=False, centring_coef=0.0)
LISTS = dataclasses.replace(PAIRS, loss="plackett_luce")
OPTIONS = {
    "learning_rate": 1e-3, "weight_decay": 0.0, "warmup_fraction": 0.1, "epochs": 4, "batch_size": 8,
    "max_grad_norm": 1.0, "adam_betas": (0.9, 0.999), "adam_eps": 1e-8, "seed": 1,
    "max_skipped_steps": 0, "saves": None,
}  # fmt: skip


def row(*responses: list[int], ranks: list[int] | None = None, name: str = "q", **data: float) -> Ranked:
    places = list(range(len(responses))) if ranks is None else ranks
    return Ranked(
        name,
        "p",
        "made",
        [[1, 80]] * len(responses),
        list(responses),
        places,
        data.get("margin", 0.0),
        data.get("agreement"),
    )


def made(count: int = 64, *, seed: int = 0, sizes: tuple[int, ...] = (2,)) -> list[Ranked]:
    """The best response holds token 90 and the worst one token 91; others hold neither."""
    rng = np.random.default_rng(seed)
    noise = lambda: rng.integers(70, 89, rng.integers(1, 4)).tolist()
    rows = []
    for index in range(count):
        marks = [[90], *([[]] * (sizes[index % len(sizes)] - 2)), [91]]
        rows.append(row(*([*noise(), *mark, *noise(), 2] for mark in marks), name=f"q{index}"))
    return rows


def classifier(directory):
    return new_classifier(directory, device=CPU, precision="float32", seed=0)


def evaluate(model, rows: list[Ranked] | None = None) -> dict[str, float]:
    rows = rows or made()
    return ranking(rows, scores(model, rows, QUIET, progress=lambda rows: None))


def trained(model, rows: list[Ranked], held_out=(), objective: Objective = PAIRS, **options) -> Trained:
    return train(model, rows, list(held_out), objective, QUIET, **OPTIONS | options, progress=lambda loss: None)


@pytest.mark.parametrize("encoder", [False, True])
def test_learns_what_the_pairs_have_in_common(tiny_dir, tmp_path, encoder):
    model = classifier(save_encoder(tmp_path) if encoder else tiny_dir)
    rows = made()
    if encoder:  # its vocabulary is smaller
        rows = [
            dataclasses.replace(
                one, prompt_ids=[[2, 5]] * 2, response_ids=[[t - 60 for t in r[:-1]] for r in one.response_ids]
            )
            for one in rows
        ]
    trained(model, rows)
    found = evaluate(model, rows)
    assert found["eval/accuracy"] > 0.95 and found["eval/margin_mean"] > 1 and found["eval/pairs"] == 64


@pytest.mark.parametrize("loss", ["pairs", "plackett_luce"])
def test_both_losses_learn_the_order_of_lists(tiny_dir, loss):
    model, rows = classifier(tiny_dir), made(sizes=(2, 3))
    data = all_pairs(rows, ties="drop") if loss == "pairs" else whole_lists(rows)
    trained(model, data.rows, objective=dataclasses.replace(PAIRS, loss=loss), learning_rate=3e-3)
    assert evaluate(model, rows)["eval/accuracy"] > 0.95


@pytest.mark.parametrize(
    "objective, sizes", [(PAIRS, (2,)), (dataclasses.replace(LISTS, centring_coef=0.3), (2, 3, 4))]
)
def test_gradient_of_a_batch_does_not_depend_on_the_split(tiny_dir, objective, sizes):
    gradients = []
    for max_batch_tokens in (1, 40, 10_000):
        model = classifier(tiny_dir)
        execution = dataclasses.replace(QUIET, max_batch_tokens=max_batch_tokens)
        loss = accumulate(model, made(7, sizes=sizes), objective, execution, batch_size=7)
        gradients.append((loss, torch.cat([p.grad.flatten() for p in model.parameters()])))
    for loss, gradient in gradients[:2]:
        assert loss == pytest.approx(gradients[2][0], abs=1e-6)
        assert torch.allclose(gradient, gradients[2][1], atol=1e-5)


def test_margin_smoothing_ties_and_centring_by_hand():
    # Scores (1, 0), data margin 0.5, margin_coef 2: z = 0, so loss ln 2, plus 0.1 * (1 + 0)^2.
    # Scores (2, 2), tied: z = 0, loss ln 2 whatever the margin, plus 0.1 * 16.
    rows = [row([5], [6], margin=0.5), row([5], [6], ranks=[1, 1], margin=9.0)]
    objective = dataclasses.replace(PAIRS, margin_coef=2.0, centring_coef=0.1)
    found = list_losses(torch.tensor([1.0, 0.0, 2.0, 2.0], dtype=torch.float64), rows, objective)
    assert found.tolist() == pytest.approx([math.log(2) + 0.1, math.log(2) + 1.6], rel=1e-12)
    # z = ln 3: -log sigmoid(z) = ln 4/3, -log sigmoid(-z) = ln 4. Smoothing 0.25: 0.75 ln 4/3 + 0.25 ln 4.
    smooth = dataclasses.replace(PAIRS, label_smoothing=0.25)
    found = list_losses(torch.tensor([math.log(3), 0.0], dtype=torch.float64), rows[:1], smooth)
    assert found.item() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4), rel=1e-12)
    # A tie is half of each direction, smoothing or not: 0.5 ln 4/3 + 0.5 ln 4.
    found = list_losses(torch.tensor([math.log(3), 0.0], dtype=torch.float64), rows[1:], smooth)
    assert found.item() == pytest.approx(0.5 * math.log(16 / 3), rel=1e-12)


def test_soft_labels_by_hand():
    # z = ln 3, agreement 0.75: 0.75 ln 4/3 + 0.25 ln 4. With smoothing 0.1: q = 0.75 * 0.9 + 0.25 * 0.1 = 0.7.
    rows = [row([5], [6], agreement=0.75), row([5], [6])]
    found = torch.tensor([math.log(3), 0.0] * 2, dtype=torch.float64)
    for smoothing, q in ((0.0, 0.75), (0.1, 0.7)):
        soft = dataclasses.replace(PAIRS, soft_labels=True, label_smoothing=smoothing)
        losses = list_losses(found, rows, soft).tolist()
        assert losses[0] == pytest.approx(q * math.log(4 / 3) + (1 - q) * math.log(4), rel=1e-12)
        assert losses == [losses[0], list_losses(found, rows, dataclasses.replace(soft, soft_labels=False))[1].item()]


def test_centring_brings_the_mean_of_the_scores_to_zero(tiny_dir):
    means = []
    for coefficient in (0.0, 1.0):
        model = classifier(tiny_dir)
        trained(model, made(), objective=dataclasses.replace(PAIRS, centring_coef=coefficient))
        means.append(np.concatenate(scores(model, made(), QUIET, progress=lambda rows: None)).mean())
    assert abs(means[1]) < 0.2 and abs(means[1]) < abs(means[0])


def test_the_best_epoch_by_held_out_pairs_is_kept(tiny_dir):
    # Held-out pairs say the contrary of the training pairs: every epoch makes their loss worse, so the first is best.
    contrary = [one.picked([1, 0]) for one in made(16, seed=1)]
    contrary = [dataclasses.replace(one, ranks=[0, 1]) for one in contrary]
    model = classifier(tiny_dir)
    found = trained(model, made(), contrary)
    assert found.best_epoch == 1
    last = trained(classifier(tiny_dir), made())  # nothing held out: the last of the same four epochs
    assert last.best_epoch == 4 and last.loss < found.loss


def test_what_is_kept_is_the_model_as_it_was_after_that_epoch(tiny_dir, monkeypatch):
    """Three epochs whose held-out losses are made to be 3, 1, 2."""
    from rlhf_core.training import reward_model

    seen, losses = [], iter([3.0, 1.0, 2.0])
    model = classifier(tiny_dir)

    def measured(rows, found):
        seen.append(model.score.weight.detach().clone())
        return next(losses)

    monkeypatch.setattr(reward_model, "held_out_loss", measured)
    found = trained(model, made(), made(4, seed=1), epochs=3)
    assert found.best_epoch == 2 and torch.equal(model.score.weight, seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_training_twice_gives_the_same_bits(tiny_dir):
    first, second = classifier(tiny_dir), classifier(tiny_dir)
    results = [trained(model, made(20), made(8, seed=1), epochs=2) for model in (first, second)]
    assert results[0] == results[1]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


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


def test_frozen_layers_of_an_encoder_include_its_positions(tmp_path):
    model = classifier(save_encoder(tmp_path))
    freeze_lowest(model, 1)
    names = {name for name, _ in trainable(model, "rm")}
    assert not any("embeddings" in name or ".layer.0." in name for name in names)
    assert any(".layer.1." in name for name in names)


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
    optimizer = adamw([(named, 1e-3)], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, kind="adamw")
    assert len(optimizer.param_groups[0]["params"]) == len({id(p) for _, p in named}) == len(named)
