"""Loading a tokenizer, its end-of-sequence ids and its pad id."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import ModelError
from rlhf_core.models.tokenizer import eos_ids, load_tokenizer, pad_id, token_text
from tests.tiny import tiny_tokenizer


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A directory with the tiny tokenizer (eos 2, pad 0) and nothing else."""
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_loads_what_was_saved(tiny_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_dir)
    assert tokenizer.encode("ab", add_special_tokens=False) == [261]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, pad_id(tokenizer)) == (1, 2, 0)
    assert tokenizer.chat_template == tiny_tokenizer().chat_template


def test_a_directory_without_tokenizer_says_what_to_do(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_dir / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"no tokenizer files .*copy the tokenizer of the model"):
        load_tokenizer(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: no such directory"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_broken_tokenizer_file_is_an_error_not_a_traceback(plain: Path) -> None:
    (plain / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="the tokenizer cannot be read"):
        load_tokenizer(plain)


# trl#422: a model without pad token. The EOS takes its place; the vocabulary, and so the embedding, does not grow.
def without_pad(**other: None) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    for name, value in other.items():
        setattr(tokenizer, name, value)
    return tokenizer


def test_a_missing_pad_token_becomes_the_eos_and_is_recorded(tmp_path: Path) -> None:
    without_pad().save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert (pad_id(tokenizer), tokenizer.pad_token, len(tokenizer)) == (2, "<eos>", 266)
    tokenizer.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())["pad_token"] == "<eos>"


def test_neither_pad_nor_eos_is_an_error(tmp_path: Path) -> None:
    without_pad(eos_token=None).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="neither a pad nor an EOS token"):
        load_tokenizer(tmp_path / "model")


# trl#7039: replies that ended with another EOS than the tokenizer's counted as cut off. The tokenizer's is 2.
@pytest.mark.parametrize(
    ("declared", "expected"), [(4, [2, 4]), ([2, 4], [2, 4]), ([4, 3], [2, 3, 4]), (None, [2]), (2, [2]), ([], [2])]
)
def test_eos_ids_are_the_union_of_integer_list_or_null_with_the_tokenizers(
    plain: Path, declared: object, expected: list[int]
) -> None:
    (plain / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    assert eos_ids(plain, load_tokenizer(plain)) == expected


def test_config_json_speaks_only_where_there_is_no_generation_config(plain: Path) -> None:
    (plain / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [4]}))
    assert eos_ids(plain, load_tokenizer(plain)) == [2, 4]
    (plain / "generation_config.json").write_text("{}")
    assert eos_ids(plain, load_tokenizer(plain)) == [2]


def test_the_tokenizers_eos_is_enough(plain: Path) -> None:
    assert eos_ids(plain, load_tokenizer(plain)) == [2]


@pytest.mark.parametrize("declared", ["</s>", [2, "x"], True, [-1], 2.5])
def test_eos_ids_of_another_form_are_refused(plain: Path, declared: object) -> None:
    (plain / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id is .*; expected a token id"):
        eos_ids(plain, load_tokenizer(plain))


def test_no_eos_anywhere_is_an_error(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="no EOS id"):
        eos_ids(tmp_path / "model", load_tokenizer(tmp_path / "model"))


def test_an_id_beyond_the_tokenizers_vocabulary_is_shown_as_a_number(tiny_dir: Path) -> None:
    # The tiny tokenizer ends at id 265; a model whose vocabulary is padded may sample 299.
    tokenizer = load_tokenizer(tiny_dir)
    assert [token_text(tokenizer, token) for token in (69, 265, 299)] == ["a", "ll", "[id 299]"]
