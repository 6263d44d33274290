"""Row filters such as "score > 0.5 and finish_reason == 'stop'", without executing what a person typed.

The text is parsed by Python's own parser into a tree, and only these nodes are understood: and, or, not; comparisons
(== != < <= > >=, chained too) of a column with a literal or another column; `is None`; `in (...)`; and text in a column
('sorry' in response). Everything else, calls and attributes above all, is refused by name.
"""

import ast
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.errors import RlhfError

# Characters. Longer filters are no filters, and deep trees would exhaust the parser.
MAX_LENGTH = 2000

_COMPARISONS = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_HELP = "a filter compares columns with values, joined by and, or, not: score > 0.5 and finish_reason == 'stop'"


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed filter: which columns it needs, and which rows it keeps."""

    text: str
    tree: ast.expr
    names: frozenset[str]

    def mask(self, table: pa.Table) -> Any:
        """Return one bool for each row; a comparison with an unknown value (null) is not true.

        Args:
            table: At least the columns in `names`.

        Raises:
            RlhfError: If a column cannot be compared in this way.
        """
        mask = _truth(self.tree, table)
        return pc.fill_null(mask, False)


def parse_filter(text: str) -> Filter:
    """Parse a filter.

    Raises:
        RlhfError: With the part that is not understood and what a filter may be.
    """
    if len(text) > MAX_LENGTH:
        raise RlhfError(f"filter of {len(text)} characters; at most {MAX_LENGTH} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        _check(tree)
    except SyntaxError as error:
        raise RlhfError(f"filter {text!r}: {error.msg} at character {error.offset}; {_HELP}") from None
    except (RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, RlhfError):
            raise
        raise RlhfError(f"filter {text[:60]!r}...: nested too deeply or not text; {_HELP}") from None
    names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    if not names:
        raise RlhfError(f"filter {text!r}: names no column; {_HELP}")
    return Filter(text, tree, names)


def _check(node: ast.expr) -> None:
    """Refuse any node that is not a truth value of the grammar."""
    if isinstance(node, ast.BoolOp):
        for part in node.values:
            _check(part)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _check(node.operand)
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            _check_comparison(left, operator, right)
    else:
        raise _refused(node)


def _check_comparison(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> None:
    if isinstance(operator, ast.In | ast.NotIn):
        values = (
            isinstance(right, ast.List | ast.Tuple | ast.Set) and bool(right.elts) and all(map(_is_literal, right.elts))
        )
        substring = isinstance(right, ast.Name) and isinstance(left, ast.Constant) and isinstance(left.value, str)
        if not (substring or (isinstance(left, ast.Name) and values)):
            raise _refused(right, "`in` takes a column and a list of values, or a text and a column")
    elif isinstance(operator, ast.Is | ast.IsNot):
        if not (isinstance(left, ast.Name) and isinstance(right, ast.Constant) and right.value is None):
            raise _refused(right, "`is` only compares a column with None")
    else:
        for side in (left, right):
            if not isinstance(side, ast.Name) and not _is_literal(side):
                raise _refused(side)
            if isinstance(side, ast.Constant) and side.value is None:
                raise _refused(side, "write `is None` or `is not None`")


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        node = node.operand
        return (
            isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)
        )
    return isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | type(None))


def _refused(node: ast.AST, reason: str = "") -> RlhfError:
    return RlhfError(f"filter: {ast.unparse(node)[:80]!r} is not allowed{': ' + reason if reason else ''}; {_HELP}")


def _truth(node: ast.expr, table: pa.Table) -> Any:
    if isinstance(node, ast.BoolOp):
        join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
        result = _truth(node.values[0], table)
        for part in node.values[1:]:
            result = join(result, _truth(part, table))
        return result
    if isinstance(node, ast.UnaryOp):
        return pc.invert(_truth(node.operand, table))
    assert isinstance(node, ast.Compare)
    sides = [node.left, *node.comparators]
    masks = [_compare(*step, table) for step in zip(sides, node.ops, sides[1:], strict=False)]
    result = masks[0]
    for mask in masks[1:]:
        result = pc.and_kleene(result, mask)
    return result


def _compare(left: ast.expr, operator: ast.cmpop, right: ast.expr, table: pa.Table) -> Any:
    try:
        if isinstance(operator, ast.Is | ast.IsNot):
            mask = pc.is_null(_operand(left, table))
        elif isinstance(operator, ast.In | ast.NotIn) and isinstance(right, ast.Name):
            mask = pc.match_substring(_operand(right, table), ast.literal_eval(left))
        elif isinstance(operator, ast.In | ast.NotIn):
            column = _operand(left, table)
            equal = [pc.equal(column, pa.scalar(value)) for value in ast.literal_eval(right)]
            mask = equal[0]
            for more in equal[1:]:
                mask = pc.or_kleene(mask, more)
        else:
            return _broadcast(_COMPARISONS[type(operator)](_operand(left, table), _operand(right, table)), table)
    except pa.ArrowException:
        found = ", ".join(
            f"{side.id} is {table.schema.field(side.id).type}" for side in (left, right) if isinstance(side, ast.Name)
        )
        text = ast.unparse(ast.Compare(left=left, ops=[operator], comparators=[right]))
        raise RlhfError(
            f"filter: cannot evaluate {text!r}: {found}. Compare numbers with numbers and text with quoted text; lists"
            " cannot be compared (see kl, response_length, num_tokens)"
        ) from None
    return pc.invert(mask) if isinstance(operator, ast.NotIn | ast.IsNot) else mask


def _operand(node: ast.expr, table: pa.Table) -> Any:
    return table.column(node.id) if isinstance(node, ast.Name) else pa.scalar(ast.literal_eval(node))


def _broadcast(mask: Any, table: pa.Table) -> Any:
    """A comparison of two literals is one value for all rows."""
    return (
        pa.chunked_array([pa.array([mask.as_py()] * table.num_rows, pa.bool_())])
        if isinstance(mask, pa.Scalar)
        else mask
    )
