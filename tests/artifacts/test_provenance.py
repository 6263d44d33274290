"""Content hashes: what changes them and what must not."""

import hashlib
from pathlib import Path

import pytest

from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.errors import ArtifactError, ModelError


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_file_hash_is_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    # The test vector of FIPS 180-2, appendix B.1.
    assert hash_path(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_directory_hash_is_over_sorted_names_and_contents(tmp_path: Path) -> None:
    root = tree(tmp_path / "d", {"b": "2", "a/c": "1"})
    one, two = (hashlib.sha256(text).hexdigest() for text in (b"1", b"2"))
    assert hash_path(root) == hashlib.sha256(f"a/c\0{one}b\0{two}".encode()).hexdigest()


def test_directory_hash_ignores_place_and_hidden_files(tmp_path: Path) -> None:
    first = hash_path(tree(tmp_path / "one", {"a": "1", "b/c": "2"}))
    assert first == hash_path(tree(tmp_path / "two", {"b/c": "2", "a": "1", ".part-00000.parquet.tmp": "half"}))
    assert first == hash_path(tree(tmp_path / "three", {"b/c": "2", "a": "1", "b/__pycache__/c.pyc": "x"}))


@pytest.mark.parametrize(
    "files", [{"a": "1", "b": "3"}, {"a": "1", "c": "2"}, {"a": "1"}, {"a": "1", "b": "2", "c": ""}]
)
def test_directory_hash_sees_contents_names_and_counts(tmp_path: Path, files: dict[str, str]) -> None:
    assert hash_path(tree(tmp_path / "one", {"a": "1", "b": "2"})) != hash_path(tree(tmp_path / "two", files))


def test_missing_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nothing: no such file or directory"):
        hash_path(tmp_path / "nothing")


def test_tokenizer_hash_ignores_weights_and_configuration(tmp_path: Path) -> None:
    files = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "chat_template.jinja": "x"}
    one = tree(tmp_path / "one", {**files, "model.safetensors": "1", "config.json": "1"})
    two = tree(tmp_path / "two", {**files, "model.safetensors": "2", "config.json": "2", "README.md": "2"})
    three = tree(tmp_path / "three", {**files, "chat_template.jinja": "y"})
    assert hash_tokenizer(one) == hash_tokenizer(two) != hash_tokenizer(three)


def test_tokenizer_hash_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no tokenizer file"):
        hash_tokenizer(tree(tmp_path / "m", {"config.json": "{}", "model.safetensors": ""}))
