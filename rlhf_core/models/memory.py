"""Work that does not fit into memory is cut into smaller batches: the token budget halves, and the work goes on.

How rows are batched changes no result beyond rounding. Left out: a process that the system itself ends for its memory.
Also: memory that was used once stays with the process, until the next model is loaded.
"""

import ctypes
import gc
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from rlhf_core.errors import OutOfMemory

logger = logging.getLogger("rlhf")

# What torch says besides torch.OutOfMemoryError: its allocator on CPUs, and cuBLAS.
_SAID = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")

# Of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Ask the C library to use freed memory again instead of giving it back to the system after every tensor.

    Activations and gradients of hundreds of MiB come and go in every step, and each new page of memory costs a fault
    and is filled with zeros (docs/performance.md has figures). The peak stays what it is.
    To be called before anything large is allocated, by a process that runs models and then ends; where there is no
    glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)


def give_back_freed_memory() -> None:
    """Give the system what is free now, under keep_freed_memory too: the next model needs it in other pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class TokenBudget:
    """compute.max_batch_tokens, as far as memory allows."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens  # of one batch, with pads as far as its rows are run with them

    def fits(self, work: Callable[[], None], lengths: Sequence[int]) -> bool:
        """Do one batch's work; where memory runs out, halve the budget and return False.

        Args:
            work: What it has done before memory ran out is the caller's to undo.
            lengths: [B] tokens of each row of the batch.

        Raises:
            OutOfMemory: If the batch is a single row.
        """
        try:
            work()
            return True
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            if not isinstance(error, torch.OutOfMemoryError) and not any(known in said for known in _SAID):
                raise
        # Only here: while the error was handled, its traceback held the tensors of the failed pass.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        tokens = sum(lengths)  # without pads: a batch that is cut to half of these is cut, however pads are counted
        if len(lengths) == 1:
            raise OutOfMemory(
                f"a single row of {tokens} tokens does not fit into memory ({said}). Lower compute.logits_chunk_tokens,"
                " or sampling.max_new_tokens and ingest.max_prompt_tokens, or take a device with more memory"
            )
        self.tokens = min(self.tokens, tokens) // 2
        logger.warning(
            "out of memory with a batch of %d rows, %d tokens (%s); going on with batches of %d tokens at most",
            len(lengths),
            tokens,
            said,
            self.tokens,
        )
        return False


def in_batches(
    lengths: Sequence[int],
    budget: TokenBudget,
    work: Callable[[list[int]], None],
    cut: Callable[[list[int], int], list[list[int]]],
) -> None:
    """Do the work of every row once, in batches as large as the budget and memory allow.

    Args:
        lengths: [B] tokens of each row, prompt included.
        budget: Lowered where memory runs out.
        cut: Cuts the rows of these indices into batches of so many tokens.
        work: Takes the indices of a batch's rows. May be called for a row again if memory ran out in it.

    Raises:
        OutOfMemory: If a single row does not fit.
    """
    batches = cut(list(range(len(lengths))), budget.tokens)
    while batches:
        batch = batches[0]
        if budget.fits(partial(work, batch), [lengths[row] for row in batch]):
            batches.pop(0)
        else:
            batches = cut(sorted(row for batch in batches for row in batch), budget.tokens)
