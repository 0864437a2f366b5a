"""Prepare as a whole: files in, sealed samples or prompts out, counts that add up."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.base.errors import ConfigError, DataError
from eyas.base.files import read_json
from eyas.base.layout import Layout
from eyas.base.seal import read_seal, seal_faults
from eyas.chat.dialogue import read_dialogues
from eyas.store.samples import read_samples
from tests.chat.tokenizers import make_tokenizer, supervised_texts
from tests.stages.preparing import add_up, chat, config, run, samples, write


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
