"""Content hashes: which bytes an artifact was made from. No timestamps, hosts or absolute paths enter them."""

import fnmatch
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlhf_core.errors import ArtifactError, ModelError

_THREADS = 4  # files that are hashed at once; hashlib lets other threads run meanwhile
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
)


def hash_path(path: Path) -> str:
    """Return the SHA-256 of a file, or of a directory's relative file names and contents in sorted order.

    Args:
        path: A file or directory; of a directory, hidden files (unfinished writes) and Python's __pycache__ do not
            count.

    Returns:
        64 hex digits.

    Raises:
        ArtifactError: If there is no such path.
    """
    if path.is_file():
        return _hash_file(path)
    if not path.is_dir():
        raise ArtifactError(f"{path}: no such file or directory; run `dvc repro` for the stage that writes it")
    names = content_files(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        return combined_hash(dict(zip(names, pool.map(lambda name: _hash_file(path / name), names), strict=True)))


def content_files(directory: Path) -> list[str]:
    """Return the relative names of a directory's files that hash_path counts, sorted."""
    names = (file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())
    return sorted(name for name in names if not any(map(_left_out, name.split("/"))))


def combined_hash(digests: dict[str, str]) -> str:
    """Return the hash of a directory from those of its files, by relative name."""
    # A name cannot hold a NUL and a digest has a fixed length, so no two sets of files share one text.
    digest = hashlib.sha256()
    for name in sorted(digests):
        digest.update(f"{name}\0{digests[name]}".encode())
    return digest.hexdigest()


def hash_tokenizer(directory: Path) -> str:
    """Return the SHA-256 over the tokenizer's files of a model directory, so that equal tokenizers hash equal.

    Args:
        directory: A Hugging Face model directory.

    Returns:
        64 hex digits.

    Raises:
        ModelError: If the directory holds no tokenizer file.
    """
    return combined_hash({path.name: _hash_file(path) for path in tokenizer_files(directory)})


def tokenizer_files(directory: Path) -> list[Path]:
    """Return the tokenizer's files of a model directory, sorted.

    Raises:
        ModelError: If the directory holds none.
    """
    names = sorted(file.name for file in directory.glob("*") if file.is_file())
    found = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in _TOKENIZER_FILES)]
    if not found:
        raise ModelError(f"{directory}: holds no tokenizer file; save one there with AutoTokenizer.save_pretrained")
    return [directory / name for name in found]


def _left_out(part: str) -> bool:
    return part.startswith(".") or part == "__pycache__"


def _hash_file(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
