"""A reward model that learns from programs with more and fewer errors puts others of their kind in the same order.

The four programs for running sums of tests/unit/test_code_reward.py, which the sandbox orders by the tests they pass,
are not among what it learns from: those have other names and other words around the program.

Mutations that must fail here: ranks the wrong way round.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rlhf_core.models.loading import new_classifier
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.training.comparisons import Ranked, whole_lists
from rlhf_core.training.distributed import ALONE
from rlhf_core.training.reward_model import Execution, scores, train
from tests.unit.test_code_reward import NO_ERROR, ONE_ERROR, THREE_ERRORS, TWO_ERRORS
from tests.unit.test_reward_model import LISTS, OPTIONS

PROGRAMS = [NO_ERROR, ONE_ERROR, TWO_ERRORS, THREE_ERRORS]  # by errors
NAMES = ["words", "total", "sums", "Every number is added to what came before:"]
OTHERS = [
    ["items", "acc", "out", "Here it is:"],
    ["tokens", "s", "result", "Add them up one by one."],
    ["parts", "running", "res", "A loop will do:"],
    ["xs", "so_far", "ys", "This prints the sums:"],
    ["fields", "count", "found", "Read, add, print."],
    ["data", "value", "answer", "The program:"],
    ["numbers", "subtotal", "partial", "Sure!"],
    ["chunks", "state", "history", "We keep what we have so far."],
]

HELD_OUT = [
    ["w", "t", "rs", "So:"],
    ["line", "agg", "seq", "Like this"],
    ["read_in", "cum", "sums2", "I would write"],
]


def renamed(names: Sequence[str]) -> list[str]:
    """The four programs with other names for its variables, and another sentence before them."""
    found = PROGRAMS
    for old, new in zip(NAMES, names, strict=True):
        found = [program.replace(old, new) for program in found]
    return found


def test_programs_with_fewer_errors_score_higher_with_a_reward_model_that_learned_from_others(tiny_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_dir)

    def ranked(programs: list[str]) -> Ranked:
        ids = [[*tokenizer(program, add_special_tokens=False)["input_ids"], 2] for program in programs]
        return Ranked("q", "p", "made", [[1]] * 4, ids, [0, 1, 2, 3], 0.0, None)

    rng, columns = random.Random(0), list(zip(*OTHERS, strict=True))
    learned = whole_lists([ranked(renamed([rng.choice(column) for column in columns])) for _ in range(24)]).rows
    held_out = [ranked(PROGRAMS), *(ranked(renamed(names)) for names in HELD_OUT)]
    quiet = Execution(max_batch_tokens=8192, precision="float32", pad_id=0, processes=ALONE)
    model = new_classifier(tiny_dir, device=torch.device("cpu"), precision="float32", seed=0)
    options = OPTIONS | {"learning_rate": 2e-3, "epochs": 4, "batch_size": 2}
    train(model, learned, [], LISTS, quiet, **options, progress=lambda loss: None)
    found = np.stack(scores(model, held_out, quiet, progress=lambda rows: None))
    assert (found[:, 0] > found[:, 1:].max(axis=1)).all(), found  # no error before any error, in each of the four
    assert (np.diff(found.mean(axis=0)) < 0).all(), found
