"""Randomness has one source: seeds that are handed down. No global generator, no clock."""

import ast

from tests.meta.project import ROOT, python_files

# Where a generator may be seeded globally, because the library that samples or initialises has no other way.
GLOBAL = {"rlhf_core/models/loading.py", "rlhf_core/sampling/engine.py", "rlhf_core/training/lora.py"}
# torch functions that draw from the global generator unless told otherwise.
DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "multinomial", "normal"}


def dotted(node: ast.expr) -> str:
    """A name such as np.random.default_rng; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def test_every_generator_has_a_seed() -> None:
    wrong, generators = [], 0
    for path in python_files("rlhf_core", "stages"):
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
                wrong += [f"{where} imports {name}" for name in names if name in ("random", "uuid")]
            if not isinstance(node, ast.Call):
                continue
            name = dotted(node.func)
            if name.startswith(("np.random.", "numpy.random.")):
                generators += 1
                if not name.endswith(".default_rng") or not node.args:
                    wrong.append(f"{where} calls {name} without a seed")
            if (
                name.startswith("torch.")
                and name.split(".")[-1] in DRAWS
                and "generator" not in {keyword.arg for keyword in node.keywords}
            ):
                wrong.append(f"{where} calls {name} without a generator")
            if name in ("torch.manual_seed", "torch.cuda.manual_seed_all", "set_seed"):
                generators += 1
                if str(path) not in GLOBAL:
                    wrong.append(f"{where} seeds a global generator")
    assert wrong == []
    assert generators >= 5
