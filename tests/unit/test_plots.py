"""The template of `dvc plots show`: no network, licences present, and DVC fills it."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

PROJECT = Path(__file__).parents[2]
VEGA = PROJECT / "rlhf_core/report/vega"


def scripts(page: str) -> list[tuple[str, str]]:
    return re.findall(r'<script id="([^"]+)">(.*?)</script>', page, flags=re.DOTALL)


def test_template_loads_nothing() -> None:
    page = (VEGA / "page.html").read_text(encoding="utf-8")
    around = re.sub(r"(?s)(<script id=[^>]+>).*?</script>", r"\1", page)
    assert len(around) < 2000
    assert not re.search(r"\bsrc=|<link|<img|url\(|https?://", around)
    assert "default-src 'none'" in page and "connect-src" not in page
    assert "{plot_divs}" in page
    assert "{scripts}" not in page  # DVC would put its CDN tags there
    assert (VEGA / "page.html").stat().st_size < 1_500_000


def test_libraries_are_the_ones_that_are_documented() -> None:
    table = (VEGA / "README.md").read_text(encoding="utf-8")
    found = scripts((VEGA / "page.html").read_text(encoding="utf-8"))
    assert [name.rpartition("-")[0] for name, _ in found] == ["vega", "vega-lite", "vega-embed"]
    licences = (VEGA / "LICENSES.txt").read_text(encoding="utf-8")
    for name, text in found:
        library, _, version = name.rpartition("-")
        assert f"| {library} | {version} | `{hashlib.sha256(text.encode()).hexdigest()}` |" in table
        assert f"{library} {version} (BSD-3-Clause)" in licences


def test_dvc_plots_show_writes_a_page_without_the_network(tmp_path: Path) -> None:
    shutil.copytree(PROJECT / ".dvc", tmp_path / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp", "config.local"))
    shutil.copytree(VEGA, tmp_path / "rlhf_core/report/vega")
    (tmp_path / "curve.csv").write_text("iteration,objective/kl\n1,0.0\n2,1.5\n")
    with (tmp_path / "dvc.yaml").open("w") as handle:
        YAML().dump({"plots": [{"kl": {"x": "iteration", "y": {"curve.csv": "objective/kl"}}}]}, handle)
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "plots", "show"], cwd=tmp_path, check=True, capture_output=True)
    page = (tmp_path / "dvc_plots/index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script[^>]+src", page)
    assert len(scripts(page)) == 3
    assert "vegaEmbed('#" in page and '"objective/kl": "1.5"' in page
