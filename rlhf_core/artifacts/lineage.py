"""What a checkpoint directory says of itself, in lineage.json: its stage, the hashes of its inputs, and its files.

A Parquet artifact says the same in its footers (shards.py). Here too is the cheap check of a directory of weights, made
whenever it is read: sizes of all files, the hashes of the small ones, and the header of each safetensors file against
its size. Not here: the hashes of the weights, and the walk from a checkpoint back to the data (report/verify.py).
"""

import json
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.provenance import content_files, hash_path
from rlhf_core.errors import ArtifactError, ModelError
from rlhf_core.stage import write_json

LINEAGE = "lineage.json"
_WEIGHTS = ".safetensors"
_RERUN = "; make it again (delete the directory, then `dvc repro`), or delete lineage.json there if the change is meant"
_AGAIN = "; make or fetch it again: delete its directory and run `dvc repro` for the stage that writes it"


def write_lineage(directory: Path, *, stage: str, iteration: str | None = None, inputs: dict[str, str]) -> None:
    """Write lineage.json into a finished directory, beside the files that it describes.

    Args:
        directory: Holds everything else already.
        stage: That made it.
        iteration: Of the stage, where it has one.
        inputs: Path -> SHA-256 (provenance.hash_path) of everything the content was made from.
    """
    files = {
        name: {"bytes": (directory / name).stat().st_size, "sha256": hash_path(directory / name)}
        for name in content_files(directory)
        if name != LINEAGE
    }
    described = {"stage": stage, "inputs": inputs, "files": files}
    write_json(directory / LINEAGE, described if iteration is None else {**described, "iteration": iteration})


def read_lineage(directory: Path) -> dict[str, Any] | None:
    """Return what write_lineage wrote; None for a directory that no stage of ours wrote.

    Raises:
        ArtifactError: If the file holds something else.
    """
    path = directory / LINEAGE
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        files = {name: (int(file["bytes"]), str(file["sha256"])) for name, file in found["files"].items()}
        inputs = {str(name): str(digest) for name, digest in found["inputs"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path}: damaged: not the description that a stage wrote ({error}){_RERUN}") from None
    return {**found, "files": files, "inputs": inputs}


def check_directory(directory: Path) -> None:
    """Check a directory of weights as cheaply as can be: of safetensors files no more than the headers is read.

    Args:
        directory: A checkpoint of ours (then every file that lineage.json lists must be there, in its size and, but for
            the weights, with its hash), or a model directory from elsewhere.

    Raises:
        ModelError: If a listed file is missing or has another size or hash, or a safetensors file is truncated or has a
            damaged header; the message names the file. ArtifactError: As read_lineage.
    """
    lineage = read_lineage(directory)
    for name, (size, digest) in (lineage["files"] if lineage else {}).items():
        path = directory / name
        if not path.is_file():
            raise ModelError(f"{path}: missing, though {LINEAGE} beside it lists it{_RERUN}")
        if path.stat().st_size != size:
            raise ModelError(f"{path}: {path.stat().st_size} bytes, {size} were written: truncated or edited{_RERUN}")
        if path.suffix != _WEIGHTS and hash_path(path) != digest:
            raise ModelError(f"{path}: not the bytes that were written: damaged or edited{_RERUN}")
    for path in sorted(directory.rglob(f"*{_WEIGHTS}")):
        check_safetensors(path)


def check_safetensors(path: Path) -> None:
    """Check a safetensors file's header against its size; the tensors are not read.

    The file is 8 bytes with the length N of the header, N bytes of JSON, and the tensors, whose places in what follows
    are in the header. Source: the format's description in huggingface/safetensors, README.md, section Format.

    Raises:
        ModelError: If it is missing, was cut short, or its header is damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            text = handle.read(length) if 8 + length <= size else b""
        ends = [int(entry["data_offsets"][1]) for name, entry in json.loads(text).items() if name != "__metadata__"]
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file{_RERUN}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise ModelError(
            f"{path}: not a whole safetensors file ({size} bytes, its header cannot be read){_AGAIN}"
        ) from None
    expected = 8 + length + max(ends, default=0)
    if expected != size:
        raise ModelError(f"{path}: not a whole safetensors file ({size} bytes, {expected} by its header){_AGAIN}")
