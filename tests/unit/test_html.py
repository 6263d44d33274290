"""The report page: self-contained, inert whatever the data says, and the right completions in it."""

import html.parser
import json
import re
from pathlib import Path

import pyarrow as pa
import pytest

from rlhf_core.artifacts.shards import read_metadata, read_table, write_shard
from rlhf_core.config import load_run
from rlhf_core.report.html import comparisons, plain_prompts, render
from rlhf_core.report.metrics import read_history
from rlhf_core.report.plots import Point, Series, axis_ticks, line_chart, number, path_chart, sparkline, tick_labels
from rlhf_core.text import printable
from tests.fake_run import NASTY, build


class Page(html.parser.HTMLParser):
    """Collects what a browser would see: elements with attributes, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("run"), prompts=20, samples=2)


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return render(read_history(load_run(root), root))


def test_script_in_a_response_is_inert(tmp_path: Path) -> None:
    # Few prompts, so that all are shown, the nasty one among them.
    root = build(tmp_path, prompts=3, samples=1)
    text = render(read_history(load_run(root), root))
    page = Page(text)
    assert '<script>alert("x")</script>' in page.text
    assert "<script" not in text.lower()
    assert not [tag for tag, _ in page.elements if tag == "script"]
    assert "\x1b" not in text and "\u202e" not in text
    assert r"\x1b[31mred" in page.text
    assert NASTY not in page.text


def test_names_from_data_are_escaped_everywhere(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    root = build(tmp_path, prompts=3, samples=1, overrides={"score/1": {evil: 1.0}, "train_rm": {evil: 2.0}})
    text = render(read_history(load_run(root), root))
    assert not [tag for tag, _ in Page(text).elements if tag == "img"]
    assert text.count("&lt;img src=x onerror=alert(1)&gt;") == 2


def test_page_needs_nothing_from_outside_and_runs_nothing(page: str) -> None:
    found = Page(page)
    policy = next(attributes["content"] for tag, attributes in found.elements if attributes.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert not {"script", "link", "iframe", "img", "object", "embed", "form"} & {tag for tag, _ in found.elements}
    for _, attributes in found.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"url\(|@import|https?://", page)


def test_page_shows_every_part(page: str) -> None:
    found = Page(page)
    ids = {attributes["id"] for tag, attributes in found.elements if tag == "section"}
    assert ids == {"health", "curves", "completions", "reward-model", "iterations", "lineage"}
    assert "objective/kl" in found.text and "val/explained_variance" in found.text
    assert "Proxy against true reward" in found.text
    assert "81.0%" in found.text  # accuracy of the reward model
    assert "0303030303030303" in found.text  # hash of the policy that was evaluated last
    assert "a1a1a1a1a1a1a1a1" in found.text  # hash of the prompts
    assert sum(tag == "svg" and attributes.get("class") == "chart" for tag, attributes in found.elements) == 12


def test_page_is_the_same_bytes_every_time(root: Path, page: str) -> None:
    assert render(read_history(load_run(root), root)) == page


def test_page_without_iterations(tmp_path: Path) -> None:
    root = build(tmp_path, prompts=3, samples=1)
    (root / "iterations.yaml").write_text("iterations: {}\n")
    text = render(read_history(load_run(root), root))
    assert "only the base model was evaluated" in text


def test_a_branch_is_listed_but_not_on_the_chain(tmp_path: Path) -> None:
    root = build(tmp_path, prompts=3, samples=1)
    text = (root / "iterations.yaml").read_text().replace('"3": {prev: "2"', '"3": {prev: "1"')
    (root / "iterations.yaml").write_text(text)
    history = read_history(load_run(root), root)
    assert history.chain == ["1", "3"]
    assert '<th class="n">2<br><span class="soft">from 1</span></th>' in render(history)


def test_completions_are_the_extremes_and_a_seeded_rest(root: Path) -> None:
    history = read_history(load_run(root), root)
    base, latest = history.evaluations["0"], history.evaluations["3"]
    chosen = comparisons(base, latest)
    gains = {name: latest.scores[i] - base.scores[i] for i, name in enumerate(base.prompt_ids)}
    best = [pair.prompt_id for pair in chosen["Best gains"]]
    assert best == sorted(gains, key=lambda name: -gains[name])[:5]
    shown = [pair.prompt_id for pairs in chosen.values() for pair in pairs]
    assert len(shown) == len(set(shown))
    assert len(chosen["At random"]) == 6
    assert comparisons(base, latest) == chosen


def test_the_response_shown_is_the_one_nearest_to_its_prompts_mean(root: Path) -> None:
    history = read_history(load_run(root), root)
    base = history.evaluations["0"]
    for pairs in comparisons(base, history.evaluations["3"]).values():
        for pair in pairs:
            scores = [row["score"] for row in base.table.to_pylist() if row["prompt_id"] == pair.prompt_id]
            mean = sum(scores) / len(scores)
            assert pair.base.mean == pytest.approx(mean, abs=1e-6)
            assert abs(pair.base.score - mean) == pytest.approx(min(abs(score - mean) for score in scores), abs=1e-6)


def test_losses_are_shown_when_there_are_any(root: Path) -> None:
    history = read_history(load_run(root), root)
    # Back to front: every gain becomes a loss.
    chosen = comparisons(history.evaluations["3"], history.evaluations["0"])
    worst = [pair.gain for pair in chosen["Worst losses"]]
    assert worst == sorted(worst) and worst[0] < 0


@pytest.mark.parametrize(
    "prompts, plain",
    [
        (["<s>user\nHi there.<e>\nbot\n", "<s>user\nHi you.<e>\nbot\n"], ["Hi there.", "Hi you."]),
        (["Q: one", "Q: two"], ["Q: one", "Q: two"]),  # no line around them: nothing is cut
        (["same\n", "same\n"], ["same\n", "same\n"]),
        (["only"], ["only"]),
        (["a\nx\nb", "a\nb"], ["x\nb", "b"]),  # cuts never overlap
        (["[I] yes [/I]", "[I] no [/I]"], ["[I] yes ", "[I] no "]),
    ],
)
def test_chat_template_is_left_out(prompts: list[str], plain: list[str]) -> None:
    assert plain_prompts(prompts) == plain


@pytest.mark.parametrize(
    "low, high, ticks",
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (-0.31, 0.52, [-0.5, -0.25, 0.0, 0.25, 0.5, 0.75]),
        (0.0, 20.0, [0.0, 5.0, 10.0, 15.0, 20.0]),
        (1e-10, 3e-10, [1e-10, 1.5e-10, 2e-10, 2.5e-10, 3e-10]),
    ],
)
def test_axis_ticks_are_round_and_cover_the_values(low: float, high: float, ticks: list[float]) -> None:
    assert axis_ticks(low, high) == pytest.approx(ticks, rel=1e-9)


def test_tick_labels_have_the_decimals_of_their_step() -> None:
    assert tick_labels([0.0, 0.25, 0.5]) == ["0.00", "0.25", "0.50"]
    assert tick_labels([0.0, 5.0, 10.0]) == ["0", "5", "10"]
    assert tick_labels([1e-10, 2e-10]) == ["1e-10", "2e-10"]


def test_curve_runs_through_its_values() -> None:
    # Axis 0 to 1 over y 192 (bottom) to 12 (top); two positions at 1/4 and 3/4 of x 56 to 406.
    svg = line_chart(["1", "2"], [Series("s", [0.0, 1.0])], x_title="x", y_title="y")
    assert '<polyline class="line s0" points="143.5,192.0 318.5,12.0"/>' in svg


def test_gaps_are_not_drawn_over() -> None:
    svg = line_chart(["1", "2", "3"], [Series("s", [0.0, None, 1.0])], x_title="x", y_title="y")
    assert svg.count("<polyline") == 0 and svg.count("<circle") == 2


@pytest.mark.parametrize("values", [[], [None], [3.0], [3.0, 3.0], [0.0, 0.0], [1e-12, 1e12]])
def test_charts_of_odd_values_are_drawn(values: list[float | None]) -> None:
    labels = [str(index) for index in range(len(values))]
    line_chart(labels, [Series("s", values)], x_title="x", y_title="y", band=(5.0, 20.0))
    path_chart([Point("p", value, value) for value in values if value is not None], x_title="x", y_title="y")
    sparkline(values)


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "–"),
        (0.0, "0"),
        (256, "256"),
        (1234567.0, "1.2e+06"),
        (12.345, "12.35"),
        (0.12345, "0.123"),
        (2e-10, "2e-10"),
        (-0.5, "-0.500"),
    ],
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain text, naïve 日本 👍", "plain text, naïve 日本 👍"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x9b31m\x07", r"\x9b31m\x07"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("👩\u200d💻", "👩\u200d💻"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_kept_characters_stay() -> None:
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def without_reward_model(root: Path) -> Path:
    """What the stages write where ingest.preferences is null."""
    for key in "0123":
        path = root / f"data/evaluations/iteration={key}"
        table = read_table(path)
        column = table.schema.get_field_index("reward_model_score")
        table = table.set_column(column, "reward_model_score", pa.nulls(table.num_rows, pa.float32()))
        write_shard(path / "part-00000.parquet", table, table.schema, read_metadata(path))
        metrics = root / f"data/metrics/evaluate/{key}.json"
        content = json.loads(metrics.read_text())
        del content["eval/reward_model_mean"]
        metrics.write_text(json.dumps(content))
    (root / "data/metrics/train_rm.json").write_text('{"train/pairs": 0}')
    return root


def test_page_without_a_reward_model(tmp_path: Path) -> None:
    root = without_reward_model(build(tmp_path, prompts=4, samples=1))
    history = read_history(load_run(root), root)
    assert history.evaluations["0"].reward_model is None
    page = render(history)
    assert "None was trained" in page and "reward model accuracy" not in page
    assert "reward model –" not in page and "Proxy against true reward" not in page
    assert "eval/accuracy" not in page
