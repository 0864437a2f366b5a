"""What prepare refuses or leaves out, by name, and what a stop or a changing source does to it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from eyas.base.errors import ConfigError, DataError, Stopped
from eyas.base.layout import Layout
from eyas.base.progress import SilentProgress
from eyas.base.stop import StopFlag
from eyas.stages.prepare.work import prepare
from tests.chat.tokenizers import end_tokens, make_tokenizer
from tests.stages.preparing import VOCAB_SIZE, add_up, chat, config, run, samples, write

BAD = [
    ("{not json", "not JSON"),
    ({"messages": []}, "no messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role"),
    ({"input_ids": [VOCAB_SIZE], "spans": [[0, 1]]}, "wrong token row"),
    ({"text": "x"}, "unknown form"),
]


@pytest.mark.parametrize(("record", "kind"), BAD)
@pytest.mark.parametrize("regenerate", [False, True])
def test_a_bad_record_ends_the_stage_by_name_and_nothing_is_written(
    tmp_path: Path, record: Any, kind: str, regenerate: bool
):
    source = write(tmp_path, "a.jsonl", [chat("u", "one"), record, chat("v", "two")])
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(DataError, match=kind) as caught:
        run(tmp_path, config([source], regenerate=regenerate))
    assert str(caught.value.where).endswith("a.jsonl:2")
    assert caught.value.hint
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_bad_records_are_left_out_and_counted_when_so_configured(tmp_path: Path):
    records = [chat("u", "one"), *(record for record, _ in BAD), chat("v", "two")]
    source = write(tmp_path, "a.jsonl", records)
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('{"messages": [{"ro')
    statistics = run(tmp_path, config([source], on_unreadable="skip"))
    add_up(statistics)
    assert statistics["kept"] == 2
    assert statistics["dropped"] == {kind: 1 for _, kind in BAD} | {"torn last line": 1}


def test_a_conversation_that_the_template_refuses(tmp_path: Path):
    system = {"messages": [{"role": "system", "content": "s"}, *chat("u", "one")["messages"]]}
    source = write(tmp_path, "a.jsonl", [chat("u", "one"), system])
    with pytest.raises(DataError, match="template refuses") as caught:
        run(tmp_path, config([source]), template="gemma")
    assert str(caught.value.where).endswith("a.jsonl:2")
    assert "System role not supported" in str(caught.value.why)
    assert not Layout(tmp_path).data.exists() or not any(Layout(tmp_path).data.iterdir())
    statistics = run(tmp_path, config([source], on_unreadable="skip"), template="gemma")
    assert (statistics["kept"], statistics["dropped"]) == (1, {"template refused": 1})


@pytest.mark.parametrize(
    ("records", "regenerate", "what", "found"),
    [
        ([chat("u"), chat("v")], False, "no supervised token anywhere", "2 no answer"),
        ([chat("u", ""), chat("v", " ")], False, "no supervised token anywhere", "2 empty answer"),
        (
            [{"input_ids": [1, 2, 3], "labels": [-100] * 3}],
            False,
            "no supervised token",
            "1 nothing to draft",
        ),
        ([chat("word " * 300, "a")], False, "no supervised token anywhere", "1 prompt too long"),
        (
            [{"messages": [{"role": "system", "content": "s"}]}],
            True,
            "no prompt to answer",
            "1 nothing asked",
        ),
    ],
)
def test_where_nothing_is_left_the_stage_says_what_it_found(
    tmp_path: Path, records: list[Any], regenerate: bool, what: str, found: str
):
    with pytest.raises(DataError, match=what) as caught:
        run(tmp_path, config([write(tmp_path, "a.jsonl", records)], regenerate=regenerate))
    assert found in str(caught.value.why)
    assert caught.value.hint
    assert not Layout(tmp_path).samples.exists()
    assert not Layout(tmp_path).stats.exists()


def test_a_target_without_a_template_takes_token_rows_and_refuses_messages(tmp_path: Path):
    rows = write(tmp_path, "a.jsonl", [{"input_ids": [1, 2, 3], "spans": [[1, 3]]}])
    messages = write(tmp_path, "b.jsonl", [chat("u", "one")])

    def go(source: dict[str, Any]) -> None:
        prepare(
            config([source]),
            Layout(tmp_path),
            make_tokenizer(None),
            (2,),
            VOCAB_SIZE,
            SilentProgress(),
            StopFlag(),
        )

    with pytest.raises(DataError, match="no chat template"):
        go(messages)
    go(rows)
    assert len(samples(tmp_path)) == 1


@pytest.mark.parametrize(
    "sources", [[{"path": "a.jsonl"}, {"path": "x/a.jsonl"}], [{"path": "a.jsonl", "share": 0.5}]]
)
def test_sources_that_cannot_be_mixed_are_refused(tmp_path: Path, sources: list[dict[str, Any]]):
    (tmp_path / "x").mkdir()
    write(tmp_path, "a.jsonl", [chat("u", "one")])
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "x")
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, config(sources))
    assert caught.value.where == "data.sources"


@pytest.mark.parametrize("after", [0, 3, 9])
def test_a_stop_leaves_nothing_half_written(tmp_path: Path, after: int):
    class StopsAfter(StopFlag):
        def check(self) -> None:
            nonlocal after
            after -= 1
            if after < 0:
                self.request(2)
            super().check()

    source = write(tmp_path, "a.jsonl", [chat(f"u{i}", "one") for i in range(6)])
    with pytest.raises(Stopped):
        run(tmp_path, config([source]), stop=StopsAfter())
    assert not any(path.is_file() for path in Layout(tmp_path).data.rglob("*"))


def test_a_source_that_changes_between_the_two_passes_is_noticed(tmp_path: Path):
    source = write(tmp_path, "a.jsonl", [chat("u", "one"), chat("v", "two")])

    class Changes(SilentProgress):
        def start(self, label: str, *, total: int, unit: str, done: int = 0) -> None:
            if label == "render":
                write(tmp_path, "a.jsonl", [chat("u", "one"), chat("v", "other")])

    with pytest.raises(DataError, match="changed while it was read") as caught:
        prepare(
            config([source]), Layout(tmp_path), make_tokenizer("chatml"), end_tokens("chatml"), VOCAB_SIZE,
            Changes(), StopFlag(),
        )  # fmt: skip
    assert str(caught.value.where).endswith("a.jsonl:2")
