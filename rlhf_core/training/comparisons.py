"""What a reward model learns from and is measured on: ranked lists of responses, and the pairs that they hold."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranked:
    """Two or more responses to one prompt, and how they were ranked. A pair is a list of two."""

    pair_id: str
    prompt: str
    """The prompt's text: rows with equal ones are no independent evidence."""
    source: str
    prompt_ids: list[list[int]]
    """[K], once for each response: of a row that is too long for the model, how much is left depends on it."""
    response_ids: list[list[int]]
    """[K]."""
    ranks: list[int]
    """[K], 0 = best; equal = tied."""
    margin: float
    """In the labeller's units; 0 where the data has none."""
    agreement: float | None
    """Share of annotators who prefer the better response of a pair; None where the data does not tell."""

    def ids(self, place: int) -> tuple[list[int], list[int]]:
        """Prompt and response ids of one response: equal for two that the model cannot tell apart."""
        return self.prompt_ids[place], self.response_ids[place]

    def longest(self) -> int:
        """Tokens of the longest response with its prompt."""
        return max(len(prompt) + len(own) for prompt, own in zip(self.prompt_ids, self.response_ids, strict=True))

    def picked(self, places: Sequence[int]) -> "Ranked":
        """Return the list of some of the responses, in this order."""
        return Ranked(
            pair_id=self.pair_id,
            prompt=self.prompt,
            source=self.source,
            prompt_ids=[self.prompt_ids[place] for place in places],
            response_ids=[self.response_ids[place] for place in places],
            ranks=[self.ranks[place] for place in places],
            margin=self.margin if len(self.ranks) == 2 else 0.0,
            agreement=self.agreement if len(self.ranks) == 2 else None,
        )


@dataclass(frozen=True)
class Counted:
    """Lists to train on or to measure, and the pairs among their responses that say nothing."""

    rows: list[Ranked]
    ties: int  # pairs of equal rank
    identical: int  # pairs of different rank that are the same to the model, after truncation


def pair_places(row: Ranked) -> list[tuple[int, int]]:
    """Return the places (better, worse) of all pairs of unequal rank that the model can tell apart."""
    return [
        (first, second) if row.ranks[first] < row.ranks[second] else (second, first)
        for first in range(len(row.ranks))
        for second in range(first + 1, len(row.ranks))
        if row.ranks[first] != row.ranks[second] and row.ids(first) != row.ids(second)
    ]


def count(rows: Iterable[Ranked]) -> tuple[int, int]:
    """Return how many pairs are tied, and how many have unequal ranks but are the same to the model."""
    ties = identical = 0
    for row in rows:
        for first in range(len(row.ranks)):
            for second in range(first + 1, len(row.ranks)):
                tied = row.ranks[first] == row.ranks[second]
                ties += tied
                identical += not tied and row.ids(first) == row.ids(second)
    return ties, identical


def all_pairs(rows: Sequence[Ranked], *, ties: str) -> Counted:
    """Return every pair of responses of each list as a list of two, the better one first.

    Args:
        rows: Ranked lists.
        ties: "drop" leaves tied pairs out, "half" keeps those that the model can tell apart. Both count them.
    """
    pairs = []
    for row in rows:
        pairs += [row.picked(places) for places in pair_places(row)]
        if ties == "half":
            pairs += [
                row.picked((first, second))
                for first in range(len(row.ranks))
                for second in range(first + 1, len(row.ranks))
                if row.ranks[first] == row.ranks[second] and row.ids(first) != row.ids(second)
            ]
    return Counted(pairs, *count(rows))


def whole_lists(rows: Sequence[Ranked]) -> Counted:
    """Return each list, best first, for a loss of the whole order.

    Of responses that are the same to the model only the best stays. A list in which then all are tied, or only one is
    left, says nothing and is left out.
    """
    lists = []
    for row in rows:
        order = sorted(range(len(row.ranks)), key=lambda place: (row.ranks[place], place))
        kept: list[int] = []
        for place in order:
            if all(row.ids(place) != row.ids(other) for other in kept):
                kept.append(place)
        if row.ranks[kept[0]] != row.ranks[kept[-1]]:
            lists.append(row.picked(kept))
    return Counted(lists, *count(rows))
