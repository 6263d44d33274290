"""Make the prompts of the preset `sums`, data/raw/sums.jsonl. The file is in git; no run needs this.

    python -m data.make_sums        # a second, no model

Recipe, seed 0:
- One-digit sums: a and b from 0 to 9, all 55 pairs that differ in more than their order; 20 of them are held out, 35
  are to train on.
- Two-digit sums: a and b from 10 to 99, 62 pairs drawn from all 4095; 14 are held out, 48 are to train on.
- Every pair is asked both ways round (once where a = b), and both stay on one side: whoever has seen 3 + 8 has as good
  as seen 8 + 3. So no held-out sum is in the training prompts in any form; its result may be (4 + 7 is 11, too).

The order is shuffled by the same seed. The ground truth is the result, a number.
"""

import json
import random
import sys
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

SEED = 0
OUT = Path("data/raw/sums.jsonl")

# Operands, pairs to train on, pairs held out.
KINDS = (
    (range(10), 35, 20),
    (range(10, 100), 48, 14),
)
SYSTEM = "Answer with a number."
QUESTION = "{} + {}"


def prompt_rows() -> list[dict[str, Any]]:
    """Return the prompts with their ground truth and split, in a seeded order."""
    generator = random.Random(SEED)
    rows = []
    for operands, train, held_out in KINDS:
        pairs = list(combinations_with_replacement(operands, 2))
        for index, (a, b) in enumerate(generator.sample(pairs, train + held_out)):
            for first, second in dict.fromkeys([(a, b), (b, a)]):
                rows.append(
                    {
                        "prompt": [
                            {"role": "system", "content": SYSTEM},
                            {"role": "user", "content": QUESTION.format(first, second)},
                        ],
                        "ground_truth": first + second,
                        "split": "eval" if index < held_out else "train",
                    }
                )
    generator.shuffle(rows)
    return rows


def main() -> None:
    """Write the file."""
    rows = prompt_rows()
    OUT.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{OUT}: {len(rows)} rows, {OUT.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
