"""train_rm and score with an encoder, another tokenizer, ranked lists, ties, and several epochs.

Mutations that must fail here: ids of the policy given to a model with another tokenizer; texts of another prompt read;
ties and identical pairs not counted; epochs chosen by the training pairs.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.artifacts.schema import PREFERENCES, PROMPTS
from rlhf_core.artifacts.shards import read_metadata, read_table, shard_name, write_shard
from rlhf_core.errors import DataError, RowMismatch
from stages import score, train_rm
from tests.tiny import save_tiny
from tests.tiny_encoder import save_encoder
from tests.tiny_run import POLICY, PROMPT, change, stage

METRICS, REWARD_MODEL = Path("data/metrics/train_rm.json"), Path("data/checkpoints/reward_model")
TURNS = [{"role": "user", "content": "ab"}]
CONTENT = {"p0": "a x", "p1": "a y", "p2": "a z"}


def write_rows(rows: list[dict[str, Any]]) -> None:
    """Rows of data/preferences, each over what most have in common."""
    common = {
        "messages": TURNS,
        "prompt": "rendered",
        "prompt_ids": PROMPT,
        "responses": ["good", "bad"],
        "response_ids": [[90, 2], [91, 2]],
        "ranks": [0, 1],
        "margin": None,
        "source": "made",
        "split": "train",
    }
    rows = [{**common, "pair_id": f"q{index}", **row} for index, row in enumerate(rows)]
    table = pa.Table.from_pylist(rows, schema=PREFERENCES)
    metadata = {"stage": "ingest", "tokenizer": hash_tokenizer(POLICY / "0")}
    write_shard(Path("data/preferences") / shard_name(0), table, PREFERENCES, metadata)


def write_prompts(names: list[str]) -> None:
    """data/prompts, each with turns of its own."""
    rows = [
        {
            "prompt_id": name,
            "messages": [{"role": "user", "content": CONTENT[name]}],
            "prompt": "rendered",
            "prompt_ids": PROMPT,
            "ground_truth": None,
            "source": "made",
            "split": "train",
        }
        for name in names
    ]
    table = pa.Table.from_pylist(rows, schema=PROMPTS)
    write_shard(Path("data/prompts") / shard_name(0), table, PROMPTS, {"stage": "ingest", "tokenizer": "x"})


def measured() -> dict[str, float]:
    return json.loads(METRICS.read_text())


def varied(count: int) -> list[dict[str, Any]]:
    """Pairs of texts that all say good or bad; every fourth is held out. Their ids say nothing."""
    return [
        {
            "prompt": f"rendered {index}",
            "responses": [f"good {chr(97 + index % 26)}", f"bad {chr(97 + index % 26)}"],
            "response_ids": [[90, 70 + index % 20, 2], [90, 70 + index % 20, 4]],
            "split": "eval" if index % 4 == 3 else "train",
        }
        for index in range(count)
    ]


def test_an_encoder_learns_from_texts_and_scores_texts(project, monkeypatch, tmp_path) -> None:
    write_rows(varied(40))
    write_prompts(["p0", "p1", "p2"])
    model = save_encoder(tmp_path / "encoder")
    change("train_rm", model=str(model), batch_size=8, epochs=4, learning_rate=1e-3)
    train_rm.main()
    assert measured()["eval/accuracy"] == 1.0 and measured()["eval/prompts"] == 10
    stage(score, monkeypatch, "1", "0")
    found = read_table(Path("data/scores/iteration=1"))
    # transformers' own pipeline: the tokenizer's pair of texts, and the classifier.
    classifier = AutoModelForSequenceClassification.from_pretrained(REWARD_MODEL).eval()
    tokenizer = AutoTokenizer.from_pretrained(REWARD_MODEL)
    normal = json.loads((REWARD_MODEL / "score_normalisation.json").read_text())
    for row in found.to_pylist():
        encoded = tokenizer(CONTENT[row["prompt_id"]], row["response"], return_tensors="pt", return_token_type_ids=True)
        with torch.no_grad():
            expected = (classifier(**encoded).logits.item() - normal["mean"]) / normal["std"]
        assert row["score_reward_model"] == pytest.approx(expected, abs=1e-4)
    assert len(set(found["score_reward_model"].to_pylist())) == 3  # of three prompts with one response text


def test_a_decoder_with_another_tokenizer_reads_turns_by_its_own_template(project, monkeypatch, tmp_path) -> None:
    write_rows(varied(16))
    write_prompts(["p0", "p1", "p2"])
    source = save_tiny(tmp_path / "decoder", seed=3)
    template = source / "chat_template.jinja"
    template.write_text("{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    change("train_rm", model=str(source), batch_size=4)
    train_rm.main()
    stage(score, monkeypatch, "1", "0")
    classifier = AutoModelForSequenceClassification.from_pretrained(REWARD_MODEL).eval()
    tokenizer = AutoTokenizer.from_pretrained(REWARD_MODEL)
    normal = json.loads((REWARD_MODEL / "score_normalisation.json").read_text())
    for row in read_table(Path("data/scores/iteration=1")).to_pylist():
        text = f"<bos>[{CONTENT[row['prompt_id']]}]{row['response']}<eos>"
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = (classifier(ids).logits.item() - normal["mean"]) / normal["std"]
        assert row["score_reward_model"] == pytest.approx(expected, abs=1e-4)


def test_a_response_to_a_prompt_that_is_not_there_is_named(project, monkeypatch, tmp_path) -> None:
    write_rows(varied(8))
    write_prompts(["p0", "p1"])
    change("train_rm", model=str(save_encoder(tmp_path / "encoder")))
    train_rm.main()
    with pytest.raises(RowMismatch, match=r"sample 1-p2-0 answers prompt p2, which data/prompts does not hold"):
        stage(score, monkeypatch, "1", "0")


def test_with_the_policy_s_tokenizer_its_ids_are_read_and_no_prompts(project, monkeypatch) -> None:
    assert not Path("data/prompts").exists()
    stage(score, monkeypatch, "1", "0")


def test_ties_and_pairs_that_truncation_made_identical_are_counted(project) -> None:
    rows: list[dict[str, Any]] = [{}, {"ranks": [0, 0]}, {"response_ids": [[90, 91], [90, 91]]}]
    write_rows([{**row, "split": split} for split in ("train", "eval") for row in rows])
    train_rm.main()
    found = measured()
    assert (found["train/pairs"], found["eval/pairs"]) == (1, 1)
    for split in ("train", "eval"):
        assert found[f"{split}/ties_in_data"] == found[f"{split}/identical_after_truncation"] == 1
    change("train_rm", ties="half")
    train_rm.main()
    assert measured()["train/pairs"] == 2


def test_nothing_to_learn_is_an_error_and_leaves_no_model(project) -> None:
    shutil.rmtree(REWARD_MODEL)
    write_rows([{"ranks": [0, 0]}, {"response_ids": [[90], [90]]}, {"split": "eval"}])
    with pytest.raises(DataError, match=r"none of 2 rows of split train.*1 pairs are tied, 1 are the same"):
        train_rm.main()
    assert not REWARD_MODEL.exists()


@pytest.mark.parametrize("loss", ["pairs", "plackett_luce"])
def test_ranked_lists_of_three(project, loss) -> None:
    three = {"responses": ["good", "a", "bad"], "ranks": [1, 0, 2]}
    rows = [{**three, "response_ids": [[70 + i, 2], [90, 70 + i, 2], [91, 70 + i, 2]]} for i in range(12)]
    write_rows([{**row, "split": "eval" if i % 4 == 3 else "train"} for i, row in enumerate(rows)])
    change("train_rm", loss=loss, epochs=3, learning_rate=1e-3, centring_coef=0.1)
    train_rm.main()
    found = measured()
    assert found["train/pairs"] == (27 if loss == "pairs" else 9)
    assert found["eval/pairs"] == 9 and found["eval/prompts"] == 1
    assert 1 <= found["train/best_epoch"] <= 3 and found["eval/accuracy"] > 0.5
    assert ("9 ranked lists" if loss == "plackett_luce" else "27 pairs") in (REWARD_MODEL / "README.md").read_text()


def test_the_best_epoch_is_that_of_the_held_out_pairs(project) -> None:
    # The held-out pairs prefer what the training pairs reject, so the first epoch is the least bad.
    rows = [{"response_ids": [[90, 70 + i, 2], [91, 70 + i, 2]]} for i in range(12)]
    write_rows([{**row, "ranks": [1, 0], "split": "eval"} if i % 4 == 3 else row for i, row in enumerate(rows)])
    losses = {}
    for checkpoint, epoch in (("best", 1), ("last", 4)):
        change("train_rm", epochs=4, learning_rate=1e-3, checkpoint=checkpoint)
        train_rm.main()
        losses[checkpoint] = measured()["eval/loss"]
        assert measured()["train/best_epoch"] == epoch
    assert losses["best"] < losses["last"]


def test_the_scores_that_it_was_measured_by_are_kept(project) -> None:
    rows = varied(8)
    write_rows(rows)
    train_rm.main()
    kept = json.loads((REWARD_MODEL / "measured_scores.json").read_text())
    assert list(kept) == ["q3", "q7"]
    right = [better > worse for better, worse in kept.values()]
    assert measured()["eval/accuracy"] == sum(right) / 2
    both = [score for pair in kept.values() for score in pair]
    assert measured()["eval/raw_score_mean"] == pytest.approx(sum(both) / 4, rel=1e-12)


def test_the_stage_writes_the_same_bytes_twice(project) -> None:
    change("train_rm", epochs=2)
    hashes = []
    for _ in range(2):
        train_rm.main()
        hashes.append((hash_path(REWARD_MODEL), METRICS.read_text()))
    assert hashes[0] == hashes[1]
    assert read_metadata(Path("data/preferences"))["tokenizer"] == hash_tokenizer(REWARD_MODEL)


def test_adapters_learn_the_ranking_and_leave_a_plain_model(project) -> None:
    source = AutoModelForSequenceClassification.from_pretrained(POLICY / "0", num_labels=1).state_dict()
    rows = [{"response_ids": [[90, 70 + i, 2], [91, 70 + i, 2]]} for i in range(16)]
    write_rows([{**row, "split": "eval" if i % 4 == 3 else "train"} for i, row in enumerate(rows)])
    found = {}
    change("train_rm", epochs=3, learning_rate=3e-3, lora_rank=2, lora_targets=["q_proj", "down_proj"])
    for name in ("adapters", "again"):
        train_rm.main()
        found[name] = (hash_path(REWARD_MODEL), METRICS.read_text())
    assert found["adapters"] == found["again"]
    # 2 layers, each 2 x (64 + 64) for q_proj and 2 x (128 + 64) for down_proj; a head of 64.
    assert measured()["train/trained_parameters"] == 2 * (256 + 384) + 64
    assert measured()["eval/accuracy"] == 1.0
    assert "LoRA of rank 2, alpha 32" in (REWARD_MODEL / "README.md").read_text()
    assert not [path.name for path in REWARD_MODEL.iterdir() if "adapter" in path.name]
    trained = AutoModelForSequenceClassification.from_pretrained(REWARD_MODEL).state_dict()
    moved = {name for name in source if not torch.equal(source[name].float(), trained[name])}
    layers = {f"model.layers.{i}.{part}.weight" for i in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")}
    assert moved == {*layers, "score.weight"}


def test_without_adapters_the_library_is_not_even_imported(project, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    change("train_rm", lora_rank=0)
    train_rm.main()
    assert measured()["train/trained_parameters"] == sum(
        tensor.numel() for tensor in AutoModelForSequenceClassification.from_pretrained(REWARD_MODEL).parameters()
    )
    change("train_rm", lora_rank=2)
    with pytest.raises(ImportError):
        train_rm.main()


@pytest.mark.parametrize("precision", ["float32", "bf16-autocast"])
def test_gradient_checkpointing_changes_no_byte(project, precision) -> None:
    change("compute", precision=precision)
    found = set()
    for how in ("none", "selective", "recompute"):
        change("compute", gradient_checkpointing=how)
        train_rm.main()
        found.add(((REWARD_MODEL / "model.safetensors").read_bytes(), hash_path(METRICS)))
    assert len(found) == 1
