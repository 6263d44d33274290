"""Memory that runs out: the token budget halves, no row is lost or done twice, one row that does not fit is an error.

Mutations that must fail here: rows of a failed batch left out; the budget not kept; other errors taken for this one.
"""

from functools import partial

import pytest
import torch

from rlhf_core.errors import OutOfMemory
from rlhf_core.models.forward import cut_rows
from rlhf_core.models.memory import TokenBudget, in_batches

CPU_SAYS = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
ERRORS = [RuntimeError(CPU_SAYS), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
          RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")]  # fmt: skip


def cut(lengths: list[int]):
    """Of rows with one token of a prompt each, for a model that needs pads."""
    responses = [[7] * (length - 1) for length in lengths]
    whole = partial(cut_rows, [[1]] * len(lengths), responses, packed=False, device=torch.device("cpu"))
    return lambda rows, tokens: whole(rows, max_batch_tokens=tokens)


@pytest.mark.parametrize("error", ERRORS, ids=["cpu", "cuda", "cublas"])
def test_the_budget_halves_until_batches_fit_and_every_row_is_done_once(error, caplog):
    # 6 rows of 4 tokens: 24 do not fit, nor 12; of 6, one row at a time.
    done, tried = [], []

    def work(rows: list[int]) -> None:
        tried.append(len(rows))
        if len(rows) > 1 and len(done) == 2:
            raise error
        done.extend(rows)

    budget = TokenBudget(8)
    in_batches([4] * 6, budget, work, cut([4] * 6))
    assert sorted(done) == list(range(6)) and tried == [2, 2, 1, 1, 1, 1]
    assert budget.tokens == 4
    assert "out of memory with a batch of 2 rows, 8 tokens" in caplog.text


def test_a_budget_far_above_a_batch_is_halved_from_the_batch():
    budget = TokenBudget(1_000_000)

    def work() -> None:
        raise ERRORS[0]

    assert not budget.fits(work, [5, 3, 2])
    assert budget.tokens == 5  # half of 10; a batch of no more is another one, with pads and without


def test_one_row_that_does_not_fit_is_an_error():
    def work(rows: list[int]) -> None:
        raise ERRORS[1]

    with pytest.raises(OutOfMemory, match=r"a single row of 9 tokens does not fit into memory \(CUDA out of memory"):
        in_batches([9, 4], TokenBudget(18), work, cut([9, 4]))


def test_other_errors_are_no_matter_of_memory():
    def work(rows: list[int]) -> None:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        in_batches([9, 4], TokenBudget(18), work, cut([9, 4]))
