"""Training in several processes that share the rows of every minibatch and take the same optimiser steps.

Who a process is comes from the environment of the usual launchers (RANK, LOCAL_RANK, WORLD_SIZE), so `torchrun` and
`accelerate launch` work by hand, on several machines too; with compute.processes a stage launches itself. Every process
holds the whole model. Left out: sharding a model that does not fit into one device.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from transformers.utils import logging as transformers_logging

from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.stage import LAUNCHER

Value = TypeVar("Value")

# The main process may hash inputs and clean its work directory for long before it joins the first exchange.
_TIMEOUT = timedelta(minutes=30)
_BUCKET_ELEMENTS = 2**24  # numbers that are added over the processes at once: 64 MiB of float32 beside the gradient


@dataclass(frozen=True)
class Processes:
    """This process among those that train together."""

    rank: int  # 0 = the main process, the only one that writes
    size: int

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes, publishes and shows progress."""
        return self.rank == 0

    def share(self, lengths: Sequence[int]) -> list[int]:
        """Return which of some rows are this process's, as indices into lengths; it may be none.

        Longest first, dealt out in turn: row counts differ by one at most, and lengths are balanced.

        Args:
            lengths: [B] tokens of each row. The same in every process.
        """
        order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
        return sorted(order[self.rank :: self.size])

    def gathered(self, value: Value) -> list[Value]:
        """Return the values of all processes, in the order of their ranks. All must call it."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def collected(self, count: int, rows: Sequence[int], values: Sequence[Value]) -> list[Value]:
        """Return one value for each of all rows, of which every process has those of its share. All must call it.

        Args:
            count: Of all rows.
            rows: This process's.
            values: One for each of them.
        """
        result: list[Any] = [None] * count
        for places, found in self.gathered((rows, values)):
            for place, value in zip(places, found, strict=True):
                result[place] = value
        return result

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the processes, in float32. All must call it.

        A parameter without a gradient counts as zero: a process may have had no rows.

        Args:
            parameters: All that are trained, in the same order in every process.
        """
        if self.size == 1:
            return
        for bucket in _buckets(parameters):
            flat = torch.cat(
                [torch.zeros_like(p).flatten().float() if p.grad is None else p.grad.flatten().float() for p in bucket]
            )
            distributed.all_reduce(flat)
            for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = total.view_as(parameter).to(parameter.dtype, copy=True)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the body; where it raises an RlhfError in any process, raise that of the lowest rank in all of them.

        Raises:
            RlhfError: In every process, so that none waits for one that has stopped.
        """
        failure: RlhfError | None = None
        try:
            yield
        except RlhfError as error:
            failure = error
        first = next((error for error in self.gathered(failure) if error is not None), None)
        if first is not None:
            raise first

    def leave(self) -> None:
        """End the exchange; nothing that all must call may follow."""
        if distributed.is_initialized():
            distributed.destroy_process_group()


ALONE = Processes(rank=0, size=1)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Cut a list of parameters into pieces of bounded size; a larger parameter is a piece of its own."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(p.numel() for p in bucket) + parameter.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def launch(module: str, processes: int) -> None:
    """Replace this process by a launcher of several that run the same stage; return where there is nothing to launch.

    Replaced, not started: the launcher stays a direct child of dvc and dies with it, and its processes die with it.

    Args:
        module: The stage, such as "stages.ppo_update"; it gets this process's arguments.
        processes: On this machine. No effect where a launcher is already at work.
    """
    if processes == 1 or "WORLD_SIZE" in os.environ:
        return
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ[LAUNCHER] = str(os.getpid())
    options = ["--standalone", "--nproc-per-node", str(processes), "-m", module, *sys.argv[1:]]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "rlhf_core.training.distributed", *options])


def join(device: torch.device) -> tuple[Processes, torch.device]:
    """Meet the other processes and return this one's place among them and its device.

    Args:
        device: From compute.device. A GPU becomes the one of this process: LOCAL_RANK.

    Raises:
        ConfigError: If this machine has more processes than GPUs.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE, device
    if device.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local + 1} of this machine found {torch.cuda.device_count()} GPUs; expected one for each"
                " process: lower compute.processes"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=_TIMEOUT)
    processes = Processes(rank=distributed.get_rank(), size=size)
    if not processes.is_main:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
    return processes, device


def main() -> None:
    """Run torch's own launcher, without its logs and traceback: the process that failed has said why."""
    # Imported here: stages of one process need none of it.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
