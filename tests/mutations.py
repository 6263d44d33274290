"""One-line faults in losses, advantages and masking that some test must notice; tools/mutate.py applies them.

Each is a mistake that somebody has made: a sign, a missing mask, min for max, a shift by one token, a mean of means.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """Replace `before`, which stands exactly once in `file`, by `after`; one of `tests` must then fail."""

    file: str
    before: str
    after: str
    tests: tuple[str, ...]


KL = ("tests/unit/test_kl.py", "tests/property/test_ragged_maths.py")

MUTATIONS = [
    Mutation("rlhf_core/algorithms/kl.py", "k2: PerToken = d * d / 2", "k2: PerToken = d * d", KL),
]
