"""Rows and tables in the terminal. Text from data is shown with control characters written out, and never as markup."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_core.report.metrics import Row
from rlhf_core.report.plots import number
from rlhf_core.text import printable

# Shown in this order under a record's heading, one block each.
_BLOCKS = ("prompt", "response", "responses")
# Characters of a text in a table cell; --json prints all of it.
_CELL = 120
ITERATION_METRICS = {
    "eval/score_mean": "score\nheld-out",
    "eval/reward_model_mean": "reward model\nheld-out",
    "eval/kl": "KL, nats\nheld-out",
    "eval/finished": "finished\nheld-out",
    "objective/scores": "score\ntraining",
    "policy/clipfrac_avg": "clipped\ntraining",
}


# Columns of the token table; the sampler's logprobs are shown where the trainer's do not exist yet.
TOKEN_COLUMNS = {
    "sampler_logprobs": "logprob",
    "logprobs": "logprob",
    "ref_logprobs": "ref",
    "full_kl": "full KL",
    "values": "value",
    "importance_weights": "weight",
    "rewards": "reward",
    "advantages": "advantage",
    "returns": "return",
}
# Columns with one number after the last token, below which column of tokens they are shown.
AFTER_COLUMNS = {"bootstrap_value": "values", "bootstrap_return": "returns"}


def console() -> Console:
    """Return a console that styles nothing by itself and is 120 columns wide where there is no terminal."""
    made = Console(highlight=False, markup=False)
    return made if made.is_terminal else Console(highlight=False, markup=False, width=120)


def print_records(console: Console, rows: Sequence[Mapping[str, Any]], tokens: Sequence[Table] | None) -> None:
    """Print each row as a heading line of short values and a block for each text, then its table of tokens."""
    for index, row in enumerate(rows):
        heading = [_short(name, value) for name, value in row.items() if name not in _BLOCKS]
        console.print(Text(" · ".join(heading), style="bold"))
        for name in _BLOCKS:
            if name in row:
                console.print(Text(f"  {name}", style="dim"))
                for text in row[name] if isinstance(row[name], list) else [row[name]]:
                    for line in printable(str(text).rstrip("\n"), keep="\n").split("\n"):
                        console.print(Text(f"    {line}"), soft_wrap=False)
        if tokens is not None:
            console.print(tokens[index])
        console.print()


def print_table(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as one table, long texts cut."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0] if rows else ():
        table.add_column(Text(printable(name)), justify="right" if isinstance(rows[0][name], int | float) else "left")
    for row in rows:
        table.add_row(*(Text(_cut(_value(value))) for value in row.values()))
    console.print(table)


def token_table(
    texts: Sequence[str],
    ids: Sequence[int],
    columns: Mapping[str, Sequence[float]],
    after: Mapping[str, float | None],
) -> Table:
    """Return a table with one line for each response token, and one for the state after the last where it has numbers.

    Args:
        texts: Text of each token, [T].
        ids: Token ids, [T].
        columns: Name -> one number for each token, [T].
        after: Name of one of these columns -> its number after the last token; None = unknown.
    """
    table = Table(box=None, header_style="dim", pad_edge=True)
    for name in ("#", "id"):
        table.add_column(name, justify="right")
    table.add_column("token")
    for name in columns:
        table.add_column(Text(TOKEN_COLUMNS.get(name, printable(name))), justify="right")
    for position, (text, token_id) in enumerate(zip(texts, ids, strict=True)):
        numbers = (f"{values[position]:.4f}" for values in columns.values())
        table.add_row(str(position), str(token_id), Text(printable(text)), *numbers)
    if any(value is not None for value in after.values()):
        ends = [after.get(name) for name in columns]
        table.add_row("end", "", "", *("" if value is None else f"{value:.4f}" for value in ends))
    return table


def print_json(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one JSON object a line; ASCII only, so nothing in it steers a terminal."""
    for row in rows:
        console.file.write(json.dumps(dict(row), ensure_ascii=True, allow_nan=False) + "\n")


def iteration_table(rows: Mapping[str, Row], metric: str) -> Table:
    """Return one line for each iteration with the metrics that tell how a run goes.

    Args:
        rows: Iteration -> its metrics; "0" is the base model.
        metric: The metric that is being watched; shown first.
    """
    names = list(dict.fromkeys([metric, *ITERATION_METRICS]))
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("iteration", justify="right")
    for name in names:
        table.add_column(ITERATION_METRICS.get(name, name), justify="right", overflow="fold")
    for key, row in rows.items():
        table.add_row(f"{key} (base)" if key == "0" else key, *(number(row.get(name)) for name in names))
    return table


def _short(name: str, value: Any) -> str:
    text = _value(value)
    return text if name.endswith("_id") else f"{printable(name)} {text}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list) and len(value) > 12:
        return printable(f"[{', '.join(map(_value, value[:12]))}, ... {len(value)} items]")
    if isinstance(value, list):
        return printable(f"[{', '.join(map(_value, value))}]")
    return printable("–" if value is None else str(value))


def _cut(text: str) -> str:
    return text if len(text) <= _CELL else text[: _CELL - 1] + "…"
