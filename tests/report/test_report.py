"""The report: one file, whole, right, and readable on a phone."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eyas.report.charts import charts
from eyas.report.markdown import markdown
from eyas.report.overview import overview
from eyas.report.page import body
from eyas.stages.project import Project
from tests.browser import browser, flat_numbers, looking_at
from tests.cli.command import eyas

PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def written(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    done = eyas("report", "--project", finished, "--output", path)
    assert done.code == 0, done.err
    return path


class Links(HTMLParser):
    """Everything that a page would load or lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]


def test_the_file_needs_nothing_else(written: Path) -> None:
    text = written.read_text()
    links = Links()
    links.feed(text)
    assert links.found
    assert all(link.startswith("#") or link == "data:," for link in links.found)
    assert "plotly.js v" in text
    assert "@import" not in text.split("</style>")[0]


def test_charts_are_valid_and_hold_what_the_files_hold(finished: Path) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    drawn = {chart.id: chart for chart in charts(overview(Project.open(finished)))}
    expected = {
        "lengths", "domains", "rate-regenerate", "rate-extract", "store-growth", "store-weight", "loss",
        "step-acceptance", "walk", "learning-rate", "gradient-norm", "speed", "data-wait", "by-domain",
        "by-position", "by-drafts", "by-place", "by-prompt", "against-plain", "timeline",
    }  # fmt: skip
    assert expected <= set(drawn)
    for chart in drawn.values():
        # plotly's own schema refuses an unknown field or a wrong value
        graph_objects.Figure(data=list(chart.traces), layout=chart.layout)
    rows = [json.loads(line) for line in (finished / "drafter" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train"]
    assert drawn["loss"].traces[0]["y"] == pytest.approx([row["step_loss"][0] for row in trained])
    assert drawn["learning-rate"].traces[0]["y"] == pytest.approx([row["lr"] for row in trained])
    measured = json.loads((finished / "reports" / "evaluation.json").read_text())
    lengths = dict(zip(drawn["by-domain"].traces[0]["x"], drawn["by-domain"].traces[0]["y"], strict=True))
    assert lengths == {
        "all": measured["acceptance_length"],
        **{name: row["acceptance_length"] for name, row in measured["domains"].items()},
    }
    walked = measured["prediction"]
    (bars,) = drawn["by-drafts"].traces
    assert bars["x"] == [str(row["num_drafts"]) for row in walked["rows"]] == [str(k) for k in range(1, 9)]
    assert bars["y"] == [row["acceptance_length"] for row in walked["rows"]]
    tops = [y + up for y, up in zip(bars["y"], bars["error_y"]["array"], strict=True)]
    assert tops == pytest.approx([row["high"] for row in walked["rows"]])
    bottoms = [y - down for y, down in zip(bars["y"], bars["error_y"]["arrayminus"], strict=True)]
    assert bottoms == pytest.approx([row["low"] for row in walked["rows"]])
    for id_, groups in (("by-place", walked["places"]), ("by-prompt", walked["prompt_lengths"])):
        (bars,) = drawn[id_].traces
        of_three = [next(row for row in group["rows"] if row["num_drafts"] == 3) for group in groups]
        assert measured["num_drafts"] == 3
        assert bars["y"] == [row["acceptance_length"] for row in of_three]
        assert re.fullmatch(r"0 to \d+|from 0", bars["x"][0])
    stored = sum(p.stat().st_size for p in (finished / "store" / "segments").glob("*.safetensors"))
    assert drawn["store-growth"].traces[0]["y"][-1] == stored
    assert sum(drawn["lengths"].traces[0]["y"]) == len(eyas_ids(finished))


def eyas_ids(root: Path) -> list[str]:
    import pyarrow.parquet as pq

    return [
        name
        for p in (root / "data" / "samples").glob("*.parquet")
        for name in pq.read_table(p)["id"].to_pylist()
    ]


def test_markdown_tells_the_same(finished: Path) -> None:
    done = eyas("report", "--project", finished, "--format", "md", "--stdout")
    assert done.code == 0
    measured = json.loads((finished / "reports" / "evaluation.json").read_text())
    assert f"{measured['acceptance_length']:.3f} tokens per target forward" in done.out
    for name, row in measured["domains"].items():
        assert re.search(rf"\| {name} \| {row['num_prompts']} \| {row['acceptance_length']:.3f} \|", done.out)
    for row in measured["prediction"]["rows"]:
        text = f"{row['acceptance_length']:.3f} \\({row['low']:.3f} to {row['high']:.3f}\\)"
        assert re.search(rf"\| {row['num_drafts']} \| all tokens \| {text} \|", done.out)
    for title in (
        "Now",
        "Data",
        "Answers and extraction",
        "Store",
        "Training",
        "Evaluation",
        "Timeline",
        "Provenance",
    ):
        assert f"\n## {title}\n" in done.out
    tables = re.findall(r"(?:^\|.*\|$\n?)+", done.out, re.M)
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def test_text_of_others_stays_text(finished: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(finished, tmp_path / "p", symlinks=True))
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)> | `x` \n# y"
    stats = json.loads((root / "data" / "stats.json").read_text())
    stats["domains"][evil] = stats["domains"]["even"]
    stats["dropped"] = {evil: 3}
    (root / "data" / "stats.json").write_text(json.dumps(stats))
    path = tmp_path / "r.html"
    assert eyas("report", "--project", root, "--output", path).code == 0
    text = path.read_text()
    assert "<script>alert(1)" not in text
    assert "<img src=x" not in text
    md = markdown(overview(Project.open(root)))
    assert "<script>" not in md
    assert "\n# y" not in md
    with browser() as started, looking_at(started, path.as_uri()) as seen:
        seen.page.on("dialog", lambda dialog: seen.faults.append(dialog.message))
        seen.wait_until_drawn()
        assert seen.faults == []


def test_every_phase_has_a_report(fresh: Path, finished: Path, tmp_path: Path) -> None:
    view = overview(Project.open(fresh))
    assert "Nothing was run yet." in markdown(view)
    assert "Nothing is prepared yet." in body(view)
    assert overview(Project.open(finished)).incidents == ()  # its todos are the ordinary course of things
    killed = Path(shutil.copytree(finished, tmp_path / "killed", symlinks=True))
    log = killed / "logs" / "attempt-0001" / "events.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[: len(lines) // 2]))
    (killed / "state" / "ledger.db").unlink()
    view = overview(Project.open(killed))
    assert [incident.kind for incident in view.incidents] == ["attempt"]
    assert "killed, or the machine went down" in markdown(view)
    assert "(not finished)" in body(view)


def test_it_draws_in_a_browser_light_dark_and_on_a_phone(written: Path, finished: Path) -> None:
    status = eyas("status", "--project", finished, "--json").json
    count = len(charts(overview(Project.open(finished))))
    backgrounds = set()
    with browser() as started:
        looks: list[tuple[str, dict[str, Any]]] = [
            ("report-light", {"color_scheme": "light"}),
            ("report-dark-phone", {"color_scheme": "dark", "viewport": PHONE}),
        ]
        for name, options in looks:
            with looking_at(started, written.as_uri(), offline=True, **options) as seen:
                assert seen.wait_until_drawn() == count
                assert seen.drawn_charts() == count
                assert seen.overflow() == 0
                assert seen.cut_off() == []
                assert seen.faults == []
                assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == []
                backgrounds.add(seen.background())
                numbers, expected = seen.numbers(), flat_numbers(status)
                assert numbers["stages.extract.tokens"] > 0
                changing = ("disk.used_bytes",)
                assert {k: v for k, v in numbers.items() if k not in changing} == {
                    k: expected[k] for k in numbers if k not in changing
                }
                seen.screenshot(name)
    assert len(backgrounds) == 2


def test_a_growing_log_is_read_once_and_a_replaced_one_anew(tmp_path: Path) -> None:
    from eyas.report.growing import Growing

    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    log = Growing(path)
    assert log.news() == ([b"one", b""], True)
    with open(path, "ab") as file:
        file.write(b"o\nthree\n")
    assert log.news() == ([b"two", b"three", b""], False)
    assert log.news() == ([b""], False)
    path.write_bytes(b"x\n")
    lines, is_new = log.news()
    assert (lines, is_new) == ([b"x", b""], True)


def test_what_is_added_while_it_is_looked_at_is_seen(copy: Path) -> None:
    """The same view twice from one process, the second after a later attempt redid step 36 and went on."""
    before = overview(Project.open(copy)).training
    assert before is not None
    row = {
        "kind": "train", "at": "2026-11-30T00:00:00Z", "loss": 123.0, "step_loss": [1.0, 2.0, 3.0],
        "lr": 0.5, "grad_norm": 9.0, "tokens": 10**6, "tokens_per_second": 10.0, "data_wait_seconds": 0.0,
    }  # fmt: skip
    with open(copy / "drafter" / "metrics.jsonl", "a") as metrics:
        for step in (before.num_steps, before.num_steps + 1):
            metrics.write(json.dumps({"step": step, **row}) + "\n")
    after = overview(Project.open(copy)).training
    assert after is not None
    assert after.num_steps == before.num_steps + 1
    assert [point.loss for point in after.points[-2:]] == [123.0, 123.0]
    assert after.points[:-2] == before.points[:-1]
