"""Check params.yaml and iterations.yaml before anything is removed or run: `python -m stages.validate`.

Its out is a constant file that other stages depend on: a bad value stops here, with every old out in place, and a good
change cascades nothing by itself.
"""

import importlib.util
import os
import shutil
from pathlib import Path

from rlhf_core.config import Params, Run, load_run
from rlhf_core.errors import ConfigError
from rlhf_core.stage import publish, run_stage, work_directory

OK = Path("data/.checks/config.ok")


def main() -> None:
    """Raise with all problems, or write the constant."""
    run = load_run()
    problems = missing_inputs(run.params, Path(".")) + missing_packages(run)
    if problems:
        raise ConfigError("\n".join(problems))
    finished = work_directory("validate", {}) / OK.name
    finished.write_text("params.yaml and iterations.yaml are valid\n", encoding="utf-8")
    publish(finished, OK)


def missing_inputs(params: Params, root: Path) -> list[str]:
    """Return one line for each file or directory that params.yaml names and that does not exist."""
    problems = []
    for key, source in (("ingest.prompts", params.ingest.prompts), ("ingest.preferences", params.ingest.preferences)):
        if source is not None and not source.startswith("hub:") and not (root / source).exists():
            problems.append(f"params.yaml: {key} is {source!r}: no such file; put it there, or use hub:<owner>/<name>")
    for key, source in (("base_model.source", params.base_model.source), ("train_rm.model", params.train_rm.model)):
        # owner/name may be a Hugging Face id; anything that can only be a path must exist.
        only_a_path = source.startswith((".", "/", "~")) or source.count("/") > 1
        directory = root / Path(source).expanduser()
        if only_a_path and not directory.is_dir():
            problems.append(f"params.yaml: {key} is {source!r}: no such directory")
        elif directory.is_dir() and not (directory / "config.json").is_file():
            problems.append(f"params.yaml: {key} is {source!r}: this directory holds no model (config.json is missing)")
    return problems


def missing_packages(run: Run) -> list[str]:
    """Return one line for each optional program or package that parameters ask for and that is not installed."""
    problems = []
    in_8_bits = any(run.at(name).ppo_update.optimizer == "adamw_8bit" for name in run.iterations)
    if in_8_bits and importlib.util.find_spec("torchao") is None:
        problems.append(
            "params.yaml: ppo_update.optimizer is adamw_8bit, which needs torchao, and that is not installed; run"
            " `.venv/bin/pip install --no-deps torchao==0.18.0`, or set it to adamw"
        )
    compiler = os.environ.get("CXX", "g++")
    if run.params.compute.torch_compile and shutil.which(compiler) is None:
        problems.append(
            f"params.yaml: compute.torch_compile is true, which needs a C++ compiler, and there is no {compiler};"
            " install one, name it in the environment variable CXX, or set it to false"
        )
    return problems


if __name__ == "__main__":
    run_stage("validate", main)
