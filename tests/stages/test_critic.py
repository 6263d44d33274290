"""init_critic: every kind of critic, what it starts as, and which models are refused; and score with each of them.

Mutations that must fail here: the tokenizer check dropped; the causal check dropped; the reward model's normalisation
left out of its head; the value after the last token taken one state too early; values written without a critic.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
)

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.schema import PREFERENCES
from rlhf_core.artifacts.shards import read_metadata, read_table, shard_name, write_shard
from rlhf_core.errors import ModelError
from rlhf_core.models.batching import collate
from rlhf_core.models.checkpoint import critic_kind, load_critic, save_critic
from rlhf_core.models.forward import critic_values
from rlhf_core.models.loading import load_causal_lm
from rlhf_core.reward import passes
from stages import init_critic, score, train_rm
from tests.tiny import tiny_tokenizer
from tests.tiny_run import POLICY, PROMPT, RESPONSES, change, stage

CRITIC, REWARD_MODEL = Path("data/checkpoints/critic/0"), Path("data/checkpoints/reward_model")
CPU = torch.device("cpu")


def write_gpt2(directory: Path, *, vocab_size: int = 266, positions: int = 64) -> Path:
    """Another architecture and another hidden size than the policy's, with the policy's tokenizer."""
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=positions, n_embd=48, n_layer=2, n_head=2, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    for path in POLICY.joinpath("0").glob("*token*"):
        shutil.copyfile(path, directory / path.name)
    for path in POLICY.joinpath("0").glob("chat_template*"):
        shutil.copyfile(path, directory / path.name)


def bert_config() -> BertConfig:
    torch.manual_seed(3)
    return BertConfig(
        vocab_size=266, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, num_labels=1, pad_token_id=0,
    )  # fmt: skip


def values_by_hand(model: torch.nn.Module, head: torch.nn.Linear, response: list[int]) -> list[float]:
    """V at the states before each response token and after the last one, by the model alone: no batch, no padding."""
    with torch.no_grad():
        states = model(torch.tensor([PROMPT + response])).last_hidden_state[0]
        return head(states)[len(PROMPT) - 1 :, 0].tolist()


def head_of(directory: Path) -> torch.nn.Linear:
    tensors = load_file(directory / "value_head.safetensors")
    head = torch.nn.Linear(tensors["weight"].shape[1], 1)
    head.load_state_dict(tensors)
    return head


def plant_head(directory: Path) -> None:
    """Give a critic a head that is not 0."""
    from safetensors.torch import save_file

    torch.manual_seed(4)
    size = json.loads((directory / "critic.json").read_text())["hidden_size"]
    save_file({"weight": torch.randn(1, size), "bias": torch.randn(1)}, directory / "value_head.safetensors")


def scored_rows(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    stage(score, monkeypatch, "1", "0")
    return read_table(Path("data/scores/iteration=1")).to_pylist()


# --- kinds --------------------------------------------------------------------------------------------------------


def test_a_shared_critic_starts_at_zero_on_the_policy_s_states(project):
    assert critic_kind(CRITIC) == "shared"
    assert sorted(path.name for path in CRITIC.iterdir()) == ["critic.json", "lineage.json", "value_head.safetensors"]
    tensors = load_file(CRITIC / "value_head.safetensors")
    assert tensors["weight"].shape == (1, 64) and not any(tensor.any() for tensor in tensors.values())


def test_a_shared_critic_s_values_are_those_before_each_token_and_after_the_last(project, monkeypatch):
    plant_head(CRITIC)
    model, head = AutoModel.from_pretrained(POLICY / "0", dtype=torch.float32).eval(), head_of(CRITIC)
    for row, response in zip(scored_rows(monkeypatch), RESPONSES, strict=True):
        expected = values_by_hand(model, head, response)
        assert row["values"] == pytest.approx(expected[:-1], abs=1e-4)
        assert row["bootstrap_value"] == pytest.approx(expected[-1], abs=1e-4)  # of an empty one: after the prompt


def test_a_critic_of_another_architecture_and_size_scores(project, monkeypatch):
    change("critic", kind="separate", init=str(write_gpt2(project / "gpt2")))
    init_critic.main()
    assert json.loads((CRITIC / "critic.json").read_text()) == {"kind": "separate", "hidden_size": 48}
    assert all(row["bootstrap_value"] == 0.0 for row in scored_rows(monkeypatch))  # its head starts at 0
    plant_head(CRITIC)
    model, head = AutoModel.from_pretrained(CRITIC / "backbone", dtype=torch.float32).eval(), head_of(CRITIC)
    original = AutoModel.from_pretrained(project / "gpt2", dtype=torch.float32).eval()
    for row, response in zip(scored_rows(monkeypatch), RESPONSES, strict=True):
        expected = values_by_hand(model, head, response)
        assert expected == pytest.approx(values_by_hand(original, head, response), abs=1e-6)
        assert row["values"] == pytest.approx(expected[:-1], abs=1e-4)
        assert row["bootstrap_value"] == pytest.approx(expected[-1], abs=1e-4)
        assert len(row["values"]) == len(row["logprobs"]) == len(response)


def test_a_separate_critic_is_in_memory_only_when_the_policy_is_not(project, monkeypatch):
    change("critic", kind="separate")
    init_critic.main()
    loaded = []

    def noted(name, original):
        return lambda *a, **options: (loaded.append((name, options.get("policy"))), original(*a, **options))[1]

    for name in ("load_causal_lm", "load_critic", "load_classifier"):
        monkeypatch.setattr(passes, name, noted(name, getattr(passes, name)))
    scored_rows(monkeypatch)
    assert loaded == [("load_causal_lm", None), ("load_critic", None), ("load_classifier", None)]


def test_a_critic_from_the_policy_has_its_trunk_and_a_zero_head(project):
    change("critic", kind="separate")
    init_critic.main()
    found = AutoModel.from_pretrained(CRITIC / "backbone", dtype=torch.float32).state_dict()
    trunk = AutoModel.from_pretrained(POLICY / "0", dtype=torch.float32).state_dict()
    assert found.keys() == trunk.keys() and all(torch.equal(found[name], trunk[name]) for name in trunk)
    assert not any(tensor.any() for tensor in load_file(CRITIC / "value_head.safetensors").values())


def test_a_critic_from_the_reward_model_starts_as_the_normalised_score(project, monkeypatch):
    change("critic", kind="separate", init="reward_model")
    init_critic.main()
    described = json.loads((REWARD_MODEL / "score_normalisation.json").read_text())
    classifier = AutoModelForSequenceClassification.from_pretrained(REWARD_MODEL, dtype=torch.float32).eval()
    rows = scored_rows(monkeypatch)
    for row, response in zip(rows, RESPONSES, strict=True):
        with torch.no_grad():  # the classifier itself reads a text at its last token that is not the pad, id 0
            raw = classifier(torch.tensor([PROMPT + response])).logits.item()
        assert row["bootstrap_value"] == pytest.approx((raw - described["mean"]) / described["std"], abs=1e-4)
        if row["finish_reason"] == "stop":  # closed already, so the reward pass read the same tokens
            assert row["bootstrap_value"] == pytest.approx(row["score_reward_model"], abs=1e-4)
    assert len({round(row["bootstrap_value"], 3) for row in rows}) == len(rows)


def test_without_a_critic_there_are_no_values_and_no_checkpoint(project, monkeypatch):
    change("critic", kind="none")
    change("advantages", estimator="rloo")
    init_critic.main()
    assert [path.name for path in CRITIC.iterdir() if path.name != "lineage.json"] == ["critic.json"]
    assert json.loads((CRITIC / "critic.json").read_text()) == {"kind": "none"}
    assert load_critic(CRITIC, policy=None, device=CPU, precision="float32") is None
    rows = scored_rows(monkeypatch)
    assert "values" not in rows[0] and "bootstrap_value" not in rows[0] and "score" in rows[0]
    assert read_metadata(Path("data/scores/iteration=1"))["critic"] == hash_path(CRITIC)


def test_init_critic_writes_the_same_bytes_twice(project):
    change("critic", kind="separate", init="reward_model")
    hashes = []
    for _ in range(2):
        init_critic.main()
        hashes.append(hash_path(CRITIC))
    assert hashes[0] == hashes[1]


# --- saving and loading -------------------------------------------------------------------------------------------


def test_a_separate_critic_is_bit_exact_after_a_reload(project, tmp_path):
    change("critic", kind="separate", init=str(write_gpt2(project / "gpt2")))
    init_critic.main()
    plant_head(CRITIC)
    first = load_critic(CRITIC, policy=None, device=CPU, precision="float32")
    save_critic(first, tmp_path / "again")
    second = load_critic(tmp_path / "again", policy=None, device=CPU, precision="float32")
    batch = collate([PROMPT] * 2, [[80, 81, 2], []], [0, 1], pad_id=0, device=CPU)
    with torch.no_grad():
        found = [critic_values(critic, batch, None, precision="float32") for critic in (first, second)]
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    (CRITIC / "lineage.json").unlink()
    assert hash_path(CRITIC) == hash_path(tmp_path / "again")
    assert {path.suffix for path in CRITIC.rglob("*") if path.is_file()} == {".json", ".safetensors"}  # no pickles


def test_a_backbone_that_lacks_weights_is_refused(project):
    from safetensors.torch import save_file

    change("critic", kind="separate")
    init_critic.main()
    (CRITIC / "lineage.json").unlink()
    path = CRITIC / "backbone/model.safetensors"
    tensors = load_file(path)
    del tensors["norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"backbone: the weights lack norm\.weight, which would be left random"):
        load_critic(CRITIC, policy=None, device=CPU, precision="float32")


def test_a_head_of_another_size_is_refused(project):
    (CRITIC / "lineage.json").unlink()
    path = CRITIC / "critic.json"
    path.write_text(json.dumps({"kind": "shared", "hidden_size": 32}))
    policy = load_causal_lm(POLICY / "0", device=CPU, precision="float32")
    with pytest.raises(ModelError, match="value head for hidden size 32, but the policy has 64"):
        load_critic(CRITIC, policy=policy, device=CPU, precision="float32")


def test_an_unknown_kind_is_refused(project):
    (CRITIC / "critic.json").write_text(json.dumps({"kind": "twin"}))
    with pytest.raises(ModelError, match="kind is 'twin'; expected shared, separate or none"):
        critic_kind(CRITIC)


# --- refused ------------------------------------------------------------------------------------------------------


def refused(init: str, text: str) -> None:
    before = hash_path(CRITIC)
    change("critic", kind="separate", init=init)
    with pytest.raises(ModelError, match=text):
        init_critic.main()
    assert hash_path(CRITIC) == before


def test_a_critic_with_another_tokenizer_is_refused(project):
    directory = write_gpt2(project / "gpt2")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(directory)
    refused(str(directory), "gpt2: its tokenizer is not the policy's")


def test_an_encoder_is_refused(project):
    directory = project / "bert"
    BertModel(bert_config()).save_pretrained(directory)
    write_tokenizer(directory)
    refused(str(directory), "bert: BertModel is bidirectional")


def test_an_encoder_that_is_the_reward_model_is_refused(project):
    for name in ("config.json", "model.safetensors", "lineage.json"):
        (REWARD_MODEL / name).unlink()
    BertForSequenceClassification(bert_config()).save_pretrained(REWARD_MODEL)
    refused("reward_model", "BertForSequenceClassification: has no linear score layer")


def test_a_critic_with_too_few_embeddings_is_refused(project):
    refused(str(write_gpt2(project / "gpt2", vocab_size=265)), "266 tokens but the critic only 265 embedding rows")


def test_a_critic_with_too_few_positions_is_refused_before_it_runs(project, monkeypatch):
    change("critic", kind="separate", init=str(write_gpt2(project / "gpt2", positions=12)))
    init_critic.main()
    with pytest.raises(ModelError, match=r"critic/0: has 12 positions, but a row of .* has 13 tokens"):  # 7 + 6
        stage(score, monkeypatch, "1", "0")


def test_a_directory_that_is_none_is_refused(project):
    refused("./nowhere/at/all", "no such directory")


def test_a_reward_model_that_was_never_trained_is_refused(project):
    table = read_table(Path("data/preferences")).slice(0, 0)
    write_shard(Path("data/preferences") / shard_name(0), table, PREFERENCES, read_metadata(Path("data/preferences")))
    train_rm.main()
    refused("reward_model", "critic.init is reward_model, but data/checkpoints/reward_model holds none")
