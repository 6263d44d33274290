"""The `rlhf` command: add iterations and run them, take a preset, look at rows, check the machine.

Hyperparameters are not set here: they live in params.yaml, iterations.yaml and presets/.
"""

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from rlhf_core.artifacts.provenance import hash_tokenizer
from rlhf_core.artifacts.shards import read_metadata
from rlhf_core.config import BASE_ITERATION, ITERATION_SECTIONS, load_run
from rlhf_core.errors import RlhfError
from rlhf_core.presets import apply_preset, presets
from rlhf_core.replay import STAGES, run_again
from rlhf_core.report.doctor import diagnose
from rlhf_core.report.filters import parse_filter
from rlhf_core.report.inspect import (
    column_names,
    default_columns,
    parse_sort,
    select_rows,
    sources,
    token_columns,
    token_texts,
)
from rlhf_core.report.metrics import Row, chain_rows, main_chain, write_text
from rlhf_core.report.prune import DEFAULT_METRIC, PARTS, Rule, drop, plan
from rlhf_core.report.pruned import read_pruned
from rlhf_core.report.table import print_summary
from rlhf_core.report.terminal import (
    AFTER_COLUMNS,
    console,
    iteration_table,
    print_json,
    print_records,
    print_table,
    token_table,
)
from rlhf_core.report.verify import default_targets, resolve
from rlhf_core.report.verify import verify as walk
from rlhf_core.text import printable

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)

INTERRUPTED = 130  # what a shell reports after Ctrl-C
# All policies share the base model's tokenizer.
_TOKENIZER = Path("data/checkpoints/policy/0")


@app.command()
def iterate(
    count: Annotated[int, typer.Option(min=1, help="How many iterations to append.")] = 1,
    prev: Annotated[
        str | None, typer.Option(help="Iteration to start from; default: the last entry of iterations.yaml.")
    ] = None,
    until_converged: Annotated[
        bool, typer.Option("--until-converged", help="Add one at a time until the metric stops rising.")
    ] = False,
    patience: Annotated[int, typer.Option(min=1, help="Iterations without a new best before stopping.")] = 2,
    maximum: Annotated[int, typer.Option("--max", min=1, help="Most iterations that --until-converged adds.")] = 20,
    metric: Annotated[str, typer.Option(help="Metric that must rise.")] = "eval/score_mean",
    run: Annotated[bool, typer.Option("--run/--no-run", help="Run `dvc repro` afterwards, or only append.")] = True,
) -> None:
    """Append iterations to iterations.yaml and run them with `dvc repro`.

    Ctrl-C stops the run; iterations.yaml stays valid, and `dvc repro` goes on from there.
    """
    root = Path(".")
    if until_converged:
        if not run:
            raise RlhfError("--until-converged has to run each iteration to see its metric; leave out --no-run")
        raise typer.Exit(converge(root, prev=prev, patience=patience, maximum=maximum, metric=metric))
    names = append_iterations(root, count, prev)
    typer.echo(f"iterations.yaml: added {', '.join(names)}")
    if run:
        raise typer.Exit(repro(root))


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="An artifact: a directory of shards, its parent, or one Parquet file.")],
    where: Annotated[
        str | None, typer.Option(help="Filter, such as \"score > 0.5 and finish_reason == 'stop'\".")
    ] = None,
    sort: Annotated[str | None, typer.Option(help="Columns to sort by; a minus sorts from high to low.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Most rows to show; 0 = all.")] = 10,
    columns: Annotated[str | None, typer.Option(help="Columns to show, comma-separated, as a table.")] = None,
    sample_id: Annotated[str | None, typer.Option(help="Show the row with this id.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show every response token with its numbers.")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="Model directory whose tokenizer reads the ids.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, every column.")] = False,
) -> None:
    """Show rows of an artifact: prompt, response, finish, score, KL; with --tokens, token by token.

    Computed columns: kl (nats, sum of logprobs - ref_logprobs), response_length and num_tokens (tokens), iteration.
    """
    files = sources(path)
    available = column_names(files[0])
    several = len({source.iteration for source in files}) > 1
    shown = _shown(available, columns, as_json=as_json, several=several)
    after = [name for name in AFTER_COLUMNS if name in available]
    extra = ["response_ids", *token_columns(available), *after] if tokens else []
    if tokens and "response_length" not in available:
        raise RlhfError(
            f"{path}: --tokens needs response_ids, one list a row, as rollouts and all that is made of them have"
        )
    table = select_rows(
        path,
        columns=list(dict.fromkeys([*shown, *extra])),
        where=parse_filter(where) if where else None,
        sort=parse_sort(sort) if sort else [],
        limit=limit,
        sample_id=sample_id,
    )
    screen, rows = console(), table.to_pylist()
    tables = None
    if tokens:
        directory = tokenizer or _TOKENIZER
        _warn_if_other_tokenizer(path, directory)
        rows = [{**row, "tokens": token_texts(directory, row["response_ids"])} for row in rows]
        tables = [_token_table(row, available) for row in rows]
        shown = [*shown, *(["tokens", *extra] if as_json else [])]
    rows = [{name: row[name] for name in dict.fromkeys(shown)} for row in rows]
    if as_json:
        print_json(screen, rows)
    elif columns and not tokens:
        print_table(screen, rows)
    else:
        print_records(screen, rows, tables)
    if not rows:
        typer.echo("no row passes", err=True)


def _token_table(row: dict[str, Any], available: list[str]) -> Any:
    """Return a row's tokens with their numbers, one line each."""
    return token_table(
        row["tokens"],
        row["response_ids"],
        {name: row[name] for name in _token_columns(available)},
        {name: row[column] for column, name in AFTER_COLUMNS.items() if column in available},
    )


@app.command()
def preset(
    name: Annotated[str | None, typer.Argument(help="Name of a file in presets/; without it, all are listed.")] = None,
) -> None:
    """Write a preset into params.yaml and iterations.yaml, and show what it changed; or list the presets."""
    if name is None:
        for known, comment in presets(Path(".")).items():
            typer.echo(f"{known}  {comment}")
        return
    changes = apply_preset(Path("."), name)
    for key, old, new in changes:
        typer.echo(f"{key}: {printable(old)} -> {printable(new)}")
    if not changes:
        typer.echo(f"params.yaml and iterations.yaml hold preset {name} already")
    typer.echo("next: dvc repro; back to what git holds: git checkout params.yaml iterations.yaml")


@app.command()
def summary() -> None:
    """Show base against latest: metrics of the main chain, the gain with its interval, and where the report is."""
    print_summary(Path("."))


@app.command()
def verify(
    target: Annotated[
        str | None,
        typer.Argument(help="An artifact, such as data/scores/iteration=1 or policy/2; default: the last checkpoints."),
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Pass over what is not there; what was pruned is in any case.")
    ] = False,
) -> None:
    """Compare a checkpoint, and all it was made from back to the data, with the hashes recorded of them.

    Stops with 1 at the first file that does not match, with its expected and its found hash and what to do.
    """
    root, count, missing = Path("."), 0, 0
    for found in walk(root, [resolve(root, target)] if target else default_targets(root), allow_missing=allow_missing):
        count += 1
        missing += not found.digest
        typer.echo(f"{'ok' if found.digest else '--':3} {found.path} ({found.text})")
    left = f"; {missing} not looked at" if missing else ""
    typer.echo(f"{count - missing} artifacts, all as recorded{left}")


@app.command()
def prune(
    keep_last: Annotated[int | None, typer.Option(min=1, help="Keep the last N iterations of every chain.")] = None,
    keep_best: Annotated[int | None, typer.Option(min=1, help="Keep the N with the highest metric.")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Keep every iteration whose number K divides.")] = None,
    metric: Annotated[str, typer.Option(help="Metric of --keep-best.")] = DEFAULT_METRIC,
    parts: Annotated[str, typer.Option(help="What of a checkpoint goes; optimizer is the largest.")] = ",".join(PARTS),
    outside_cache: Annotated[
        bool, typer.Option("--outside-cache", help="Drop also from a cache outside the project, if none else uses it.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Drop old checkpoints that no rule keeps, from data/checkpoints and from DVC's cache; shows the bytes first.

    The base model, the heads of chains (those of tags and other branches too), and what a stage needs that is not up
    to date always stay. Afterwards `dvc repro --allow-missing` goes on.
    """
    rule = Rule(last=keep_last, best=keep_best, every=every, metric=metric)
    chosen = plan(Path("."), rule, parts.split(","), outside_cache=outside_cache, say=typer.echo)
    asked = "Drop them? `dvc pull` fetches what was pushed to a remote; the rest has to be trained again to come back"
    if chosen and (yes or typer.confirm(asked)):
        drop(Path("."), chosen)
        typer.echo("dropped; go on with `dvc repro --allow-missing`, and commit data/pruned.json")


@app.command()
def doctor() -> None:
    """Check Python, disk, versions, locks and parameters; exit with 1 when something must be fixed."""
    checks = diagnose(Path("."))
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        style = {"ok": "green", "warning": "yellow", "error": "red"}[check.status]
        table.add_row(Text(check.status, style=style), Text(check.name), Text(printable(check.text, keep="\n")))
    console().print(table)
    raise typer.Exit(1 if any(check.status == "error" for check in checks) else 0)


@app.command()
def replay(
    iteration: Annotated[str, typer.Argument(help="Iteration to run again, such as 2.")],
    stages: Annotated[str, typer.Option(help="Only these, comma-separated.")] = ",".join(STAGES),
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest difference of floats; default 0, on a GPU 0.05.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the copy, and say where it is.")] = False,
) -> None:
    """Run an iteration again in a temporary copy and compare every byte; exit with 1 when a stage differs.

    Each stage gets the recorded outs of the stages before it. Where bytes differ, the stage, the column and the largest
    difference are shown.
    """
    same = run_again(Path("."), iteration, stages.split(","), tolerance=tolerance, keep=keep, tell=typer.echo)
    raise typer.Exit(0 if same else 1)


def append_iterations(root: Path, count: int, prev: str | None) -> list[str]:
    """Append iterations, each starting from the one before it, and return their names.

    Comments and quoting of iterations.yaml stay. The file is replaced whole, so an interruption leaves the old or the
    new one.

    Args:
        root: Project directory.
        count: How many.
        prev: Where the first starts from; None = the last entry.

    Raises:
        RlhfError: If the files are not valid as they are, or prev does not exist or was pruned.
    """
    run = load_run(root)
    previous = prev if prev is not None else (main_chain(run) or [BASE_ITERATION])[-1]
    if previous not in {BASE_ITERATION, *run.iterations}:
        raise RlhfError(
            f"--prev {previous}: no such iteration; expected one of {', '.join([BASE_ITERATION, *run.iterations])}"
        )
    if gone := [path for path in read_pruned(root) if Path(path).name == previous]:
        raise RlhfError(
            f"iteration {previous}: `rlhf prune` dropped {', '.join(gone)}; `dvc pull {' '.join(gone)}` fetches that"
            f" from a remote, `dvc repro ppo_update@{previous}` makes it again"
        )
    first = 1 + max((int(name) for name in run.iterations if name.isascii() and name.isdigit()), default=0)
    names = [str(number) for number in range(first, first + count)]
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096  # a flow map stays on its line
    path = root / "iterations.yaml"
    content = yaml.load(path.read_text(encoding="utf-8"))
    for name in names:
        content["iterations"][DoubleQuotedScalarString(name)] = _entry(previous)
        previous = name
    text = io.StringIO()
    yaml.dump(content, text)
    write_text(path, text.getvalue())
    return names


def converge(root: Path, *, prev: str | None, patience: int, maximum: int, metric: str) -> int:
    """Add and run one iteration at a time until the metric has no new best for `patience` iterations.

    Iterations that are there already are run first and count, as does the base model where it has the metric.

    Args:
        root: Project directory.
        prev: Where the first added one starts from; None = the last entry.
        patience: Iterations without a new best before stopping.
        maximum: Most iterations to add.
        metric: Name of the metric that must rise.

    Returns:
        Exit code of the last `dvc repro`; 0 when all ran.
    """
    screen = console()
    for added in range(maximum + 1):
        if added or (load_run(root).iterations and prev is None):
            if code := repro(root):
                return code
            rows = chain_rows(load_run(root), root)
            screen.print(iteration_table(rows, metric))
            since_best = iterations_since_best(rows, metric)
            if since_best >= patience:
                screen.print(f"{metric} has had no new best for {since_best} iterations: converged")
                return 0
        if added < maximum:
            screen.print(f"iterations.yaml: added {append_iterations(root, 1, prev if not added else None)[0]}")
    screen.print(f"{maximum} iterations added and {metric} may still rise: run again to go on")
    return 0


def iterations_since_best(rows: dict[str, Row], metric: str) -> int:
    """Return how many iterations came after the highest value of a metric; a tie is no new best.

    Args:
        rows: Iteration -> metrics, oldest first; "0" may lack the metric.
        metric: Its name.

    Raises:
        RlhfError: If an iteration has no such metric.
    """
    values = {name: row[metric] for name, row in rows.items() if row.get(metric) is not None}
    missing = [name for name in rows if name != BASE_ITERATION and name not in values]
    if missing:
        known = ", ".join(sorted(name for name in rows[missing[0]] if name.startswith(("eval/", "objective/"))))
        raise RlhfError(
            f"iteration {missing[0]} has no metric {metric}; it has {known} and others (see docs/metrics.md)"
        )
    ordered = [value for value in values.values() if value is not None]
    return len(ordered) - 1 - ordered.index(max(ordered))


def repro(root: Path) -> int:
    """Run `dvc repro` with its output on this terminal and return its exit code; 130 after Ctrl-C.

    Pruned checkpoints are not made again.
    """
    options = ["--allow-missing"] if read_pruned(root) else []
    process = subprocess.Popen([sys.executable, "-m", "dvc", "repro", *options], cwd=root)
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            # The terminal sent the signal to dvc and its stage too; wait until both have cleaned up.
            process.wait()
            return INTERRUPTED


def main() -> None:
    """Run the command line; errors that a person can act on are printed without a traceback."""
    try:
        app()
    except RlhfError as error:
        print(f"{type(error).__name__}: {printable(str(error), keep=chr(10))}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        # The reader (head, less) went away; keep Python from failing again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _entry(prev: str) -> CommentedMap:
    entry = CommentedMap({"prev": DoubleQuotedScalarString(prev)})
    for section in ITERATION_SECTIONS:
        entry[section] = CommentedMap()
        entry[section].fa.set_flow_style()
    entry.fa.set_flow_style()
    return entry


def _shown(available: Sequence[str], columns: str | None, *, as_json: bool, several: bool) -> list[str]:
    if columns:
        return [name.strip() for name in columns.split(",")]
    if as_json:
        return list(available)
    return default_columns(available, several_iterations=several) or list(available)


def _token_columns(available: Sequence[str]) -> list[str]:
    """What the token table shows: the trainer's logprobs stand for the sampler's where both exist."""
    return [name for name in token_columns(available) if name != "sampler_logprobs" or "logprobs" not in available]


def _warn_if_other_tokenizer(path: Path, directory: Path) -> None:
    """Say so when ids were written with another tokenizer; a file that does not tell is taken as it is."""
    try:
        recorded: Any = read_metadata(sources(path)[0].path.parent).get("tokenizer")
    except RlhfError:
        return
    if recorded and directory.is_dir() and hash_tokenizer(directory) != recorded:
        typer.echo(f"warning: {directory} is not the tokenizer that {path} was made with", err=True)


if __name__ == "__main__":
    main()
