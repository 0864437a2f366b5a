"""Prepare as a whole: files in, sealed samples or prompts out, counts that add up."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.base.errors import ConfigError, DataError, Stopped
from eyas.base.files import read_json
from eyas.base.layout import Layout
from eyas.base.progress import SilentProgress
from eyas.base.seal import read_seal, seal_faults
from eyas.base.stop import StopFlag
from eyas.chat.dialogue import read_dialogues
from eyas.config.schema import EyasConfig
from eyas.stages.prepare.work import prepare
from eyas.store.samples import Sample, read_samples
from tests.chat.tokenizers import end_tokens, make_tokenizer, supervised_texts

VOCAB_SIZE = 500


def config(sources: list[dict[str, Any]], regenerate: bool = False, new: int = 8, **data: Any) -> EyasConfig:
    return EyasConfig.model_validate(
        {
            "target": {"model": "m"},
            "data": {"sources": sources, "max_seq_len": 200, "validation": 0.0} | data,
            "regenerate": {"enabled": regenerate, "max_new_tokens": new},
        }
    )


def write(root: Path, name: str, records: list[Any]) -> dict[str, Any]:
    path = root / name
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return {"path": name}


def run(
    root: Path, settings_: EyasConfig, template: str = "chatml", stop: StopFlag | None = None
) -> dict[str, Any]:
    return prepare(
        settings_,
        Layout(root),
        make_tokenizer(template),
        end_tokens(template),
        VOCAB_SIZE,
        SilentProgress(),
        stop or StopFlag(),
    )


def samples(root: Path) -> list[Sample]:
    assert seal_faults(Layout(root).samples) == []
    return list(read_samples(Layout(root).samples))


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]} | fields


def add_up(statistics: dict[str, Any]) -> None:
    assert statistics["records"] == statistics["kept"] + sum(statistics["dropped"].values())
    for parts in (statistics["sources"], statistics["domains"]):
        for key in ("records", "kept", "tokens", "supervised_tokens", "prompts", "turns"):
            assert statistics[key] == sum(part[key] for part in parts.values()), key
        for key in ("dropped", "samples_dropped", "conversations", "samples"):
            names = set(statistics[key]).union(*(part[key] for part in parts.values()))
            for name in names:
                expected = statistics[key].get(name, 0)
                assert expected == sum(part[key].get(name, 0) for part in parts.values()), (key, name)
        for part in parts.values():
            assert part["records"] == part["kept"] + sum(part["dropped"].values())


def test_samples_with_provenance_and_statistics(tmp_path: Path):
    first = write(tmp_path, "first.jsonl", [chat("u", "one", "v", "two", domain="maths"), chat("w", "three")])
    second = write(tmp_path, "second.jsonl.gz", [{"prompt_ids": [100, 101], "output_ids": [102, 103, 2]}])
    statistics = run(tmp_path, config([first | {"domain": "general"}, second | {"name": "rows"}]))
    add_up(statistics)
    one, two, three = samples(tmp_path)
    assert supervised_texts(make_tokenizer("chatml"), one.tokens.tolist(), one.spans) == [
        "one<|im_end|>",
        "two<|im_end|>",
    ]
    assert (one.source, one.domain, one.split, one.finish_reason, one.origin) == (
        "first", "maths", "train", "given", "given",
    )  # fmt: skip
    assert (two.domain, three.source, three.domain) == ("general", "rows", "rows")
    assert (three.tokens.tolist(), three.spans) == ([100, 101, 102, 103, 2], ((2, 5),))
    assert statistics["tokens"] == sum(len(s.tokens) for s in (one, two, three))
    assert statistics["supervised_tokens"] == sum(s.num_supervised for s in (one, two, three))
    assert statistics["lengths"]["max"] == max(len(s.tokens) for s in (one, two, three))
    assert sum(bar["count"] for bar in statistics["lengths"]["histogram"]) == 3
    layout = Layout(tmp_path)
    assert read_json(layout.stats) == read_json(layout.samples / "stats.json") == statistics
    assert read_seal(layout.samples)["about"]["num_samples"] == 3
    assert read_seal(layout.samples)["about"]["num_conversations"] == 3


def test_prompts_for_regeneration_and_given_rows_beside_them(tmp_path: Path):
    source = write(
        tmp_path,
        "a.jsonl",
        [
            chat("u", "one", "v", "two"),
            {"turns": ["x", "y"]},
            {"input_ids": [100, 101, 102], "spans": [[1, 3]]},
        ],
    )
    statistics = run(tmp_path, config([source], regenerate=True))
    add_up(statistics)
    layout = Layout(tmp_path)
    assert seal_faults(layout.prompts) == []
    dialogues = list(read_dialogues(layout.prompts / "conversations.jsonl"))
    assert [[[m.content for m in turn] for turn in d.turns] for d in dialogues] == [
        [["u"], ["v"]],
        [["x"], ["y"]],
    ]
    assert not layout.samples.exists()
    (row,) = read_samples(layout.prompts / "given")
    assert row.tokens.tolist() == [100, 101, 102]
    assert (statistics["prompts"], statistics["turns"], statistics["samples"]["train"]) == (2, 4, 1)
    about = read_seal(layout.prompts)["about"]
    assert (about["num_conversations"], about["num_turns"]) == (3, 4)


def test_conversations_that_differ_in_their_answers_ask_the_same(tmp_path: Path):
    source = write(tmp_path, "a.jsonl", [chat("u", "one"), chat("u", "two"), chat("u"), chat("u", "x", "v")])
    statistics = run(tmp_path, config([source], regenerate=True))
    assert (statistics["prompts"], statistics["dropped"]) == (2, {"duplicate": 2})


def test_prompts_of_other_text_and_the_same_ids_are_one(tmp_path: Path):
    source = write(tmp_path, "a.jsonl", [chat("u"), chat(" u "), chat("u", "a", "v")])
    statistics = run(tmp_path, config([source], regenerate=True), template="llama3")
    assert (statistics["prompts"], statistics["dropped"]) == (2, {"duplicate": 1})


def test_samples_of_other_text_and_the_same_ids_are_one(tmp_path: Path):
    source = write(
        tmp_path, "a.jsonl", [chat("u", "one"), chat("u ", " one"), chat("u", "one", name="again")]
    )
    statistics = run(tmp_path, config([source]), template="llama3")
    assert (len(samples(tmp_path)), statistics["dropped"]) == (1, {"duplicate": 2})


def test_duplicates_across_sources_count_for_the_later_one(tmp_path: Path):
    a = write(tmp_path, "a.jsonl", [chat("u", "one")])
    b = write(tmp_path, "b.jsonl", [chat("u", "one"), chat("v", "two")])
    statistics = run(tmp_path, config([a, b]))
    add_up(statistics)
    assert statistics["sources"]["b"]["dropped"] == {"duplicate": 1}
    assert [s.source for s in samples(tmp_path)] == ["a", "b"]


def test_limits_and_shares(tmp_path: Path):
    a = write(tmp_path, "a.jsonl", [chat(f"u{i}", f"one{i}") for i in range(30)])
    b = write(tmp_path, "b.jsonl", [chat(f"v{i}", f"two{i}") for i in range(30)])
    statistics = run(tmp_path, config([a | {"limit": 9}, b | {"share": 0.25}]))
    add_up(statistics)
    assert statistics["sources"]["a"]["kept"] == 9
    assert statistics["sources"]["b"]["kept"] == 3  # of 12
    assert statistics["dropped"] == {"over the source's limit": 21, "over the source's share": 27}


def test_a_limit_is_not_used_up_by_what_is_of_no_use(tmp_path: Path):
    a = write(tmp_path, "a.jsonl", [chat(f"only asked {i}") for i in range(40)] + [chat("u", "one")] * 2)
    statistics = run(tmp_path, config([a | {"limit": 1}]))
    assert statistics["kept"] == 1
    assert statistics["dropped"] == {"no answer": 40, "duplicate": 1}


def test_samples_of_one_conversation_share_its_split(tmp_path: Path):
    def thought(i: int) -> dict[str, Any]:
        said = [{"role": "assistant", "content": f"a{i}", "reasoning_content": f"r{i}"}]
        asked = [{"role": "user", "content": f"u{i}"}]
        return {"messages": asked + said + [{"role": "user", "content": "v"}] + said}

    source = write(tmp_path, "a.jsonl", [thought(i) for i in range(40)])
    statistics = run(tmp_path, config([source], validation=0.3), template="qwen3")
    made = samples(tmp_path)
    assert len(made) == 80
    sides = {s.conversation: {t.split for t in made if t.conversation == s.conversation} for s in made}
    assert all(len(side) == 1 for side in sides.values())
    assert {next(iter(side)) for side in sides.values()} == {"train", "validation"}
    assert statistics["conversations"]["validation"] == sum(side == {"validation"} for side in sides.values())


def test_pieces_of_one_conversation_and_answers_to_one_prompt_share_a_split(tmp_path: Path):
    records = []
    for i in range(30):
        records += [chat(f"u{i}", "a"), chat(f"u{i}", "a", "v", "b"), chat(f"u{i}", "other")]
    run(tmp_path, config([write(tmp_path, "a.jsonl", records)], validation=0.5))
    tokenizer = make_tokenizer("chatml")
    sides: dict[str, set[str]] = {}
    for sample in samples(tmp_path):
        opening = tokenizer.decode(sample.tokens.tolist()[: sample.spans[0][0]])
        sides.setdefault(opening, set()).add(sample.split)
    assert len(sides) == 30
    assert all(len(side) == 1 for side in sides.values())


@pytest.mark.parametrize("regenerate", [False, True])
def test_neither_side_of_the_split_stays_empty(tmp_path: Path, regenerate: bool):
    source = write(tmp_path, "a.jsonl", [chat("u", "one"), chat("v", "two")])
    statistics = run(tmp_path, config([source], regenerate=regenerate, validation=0.001))
    assert statistics["conversations"] == {"train": 1, "validation": 1}


def test_length_policies(tmp_path: Path):
    long = "word " * 300
    records = [chat("u", "one"), chat("u", long), chat(long, "one")]
    for policy, kept, dropped in (
        ("truncate", 2, {"prompt too long": 1}),
        ("drop", 1, {"prompt too long": 1, "too long": 1}),
    ):
        root = tmp_path / policy
        root.mkdir()
        statistics = run(root, config([write(root, "a.jsonl", records)], too_long=policy))
        add_up(statistics)
        assert (statistics["kept"], statistics["dropped"]) == (kept, dropped)
        assert all(len(s.tokens) <= 200 for s in samples(root))
        assert statistics["samples_truncated"] == (policy == "truncate")
    cut = max(samples(tmp_path / "truncate"), key=lambda s: len(s.tokens))
    assert (cut.spans[-1][1], cut.finish_reason) == (200, "length")


def test_a_prompt_without_room_for_its_answer_is_too_long(tmp_path: Path):
    source = write(tmp_path, "a.jsonl", [chat("u"), chat("word " * 300)])
    statistics = run(tmp_path, config([source], regenerate=True))
    assert (statistics["prompts"], statistics["dropped"]) == (1, {"prompt too long": 1})


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


TEXTS = st.sampled_from(["", " ", "a", "the", "<|im_end|>", "word " * 60, "é", "u"])
CHATS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "wizard"]), "content": TEXTS}
    ),
    max_size=5,
).map(lambda messages: {"messages": messages})
ROWS = st.builds(
    lambda ids, start, end: {"input_ids": ids, "spans": [[start, end]]},
    st.lists(st.integers(0, 501), max_size=5), st.integers(0, 4), st.integers(0, 5),
)  # fmt: skip
RECORDS = st.lists(
    st.tuples(CHATS | ROWS | st.just("{torn"), st.sampled_from([None, "x", "y"])), min_size=1, max_size=10
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(RECORDS, min_size=1, max_size=3),
    st.sampled_from([(None, None), (2, None), (None, 0.5)]),
    st.booleans(),
    st.sampled_from(["truncate", "drop"]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from(["chatml", "qwen3", "gemma"]),
)
def test_counts_add_up_to_the_input(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[tuple[Any, str | None]]],
    limits: tuple[int | None, float | None],
    regenerate: bool,
    too_long: str,
    validation: float,
    template: str,
):
    root = tmp_path_factory.mktemp("p")
    sources = []
    for index, records in enumerate(files):
        named = [r | {"domain": d} if isinstance(r, dict) and d else r for r, d in records]
        source = write(root, f"s{index}.jsonl", named)
        sources.append(source | ({"limit": limits[0], "share": limits[1]} if index else {}))
    try:
        statistics = run(
            root,
            config(
                sources,
                regenerate,
                on_unreadable="skip",
                too_long=too_long,
                validation=validation,
                max_seq_len=60,
            ),
            template,
        )
    except (DataError, ConfigError):
        assert not Layout(root).stats.exists()
        return
    add_up(statistics)
    assert statistics["records"] == sum(map(len, files))
    folder = Layout(root).prompts / "given" if regenerate else Layout(root).samples
    made = list(read_samples(folder))
    assert len({s.id for s in made}) == len(made) == sum(statistics["samples"].values())
    assert statistics["tokens"] == sum(len(s.tokens) for s in made)
    assert statistics["supervised_tokens"] == sum(s.num_supervised for s in made)
    conversations = {(s.conversation, s.split) for s in made}
    if regenerate:
        dialogues = list(read_dialogues(Layout(root).prompts / "conversations.jsonl"))
        assert statistics["prompts"] == len(dialogues)
        assert statistics["turns"] == sum(len(d.turns) for d in dialogues)
        conversations |= {(d.id, d.split) for d in dialogues}
    assert len(conversations) == len({name for name, _ in conversations}) == statistics["kept"]
    assert all(len(s.tokens) <= 60 and any(e - max(b, 1) >= 2 for b, e in s.spans) for s in made)
    shutil.rmtree(root)
