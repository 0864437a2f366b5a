"""Every input form, and every way in which a record can be wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.base.errors import DataError
from eyas.chat.conversation import Conversation, TokenRow
from eyas.chat.readers import Record, SourceReader, read_source
from eyas.chat.refusal import Unreadable

VOCAB_SIZE = 100


def read(path: Path) -> list[Record]:
    return list(read_source(path, name="src", vocab_size=VOCAB_SIZE))


def read_one(tmp_path: Path, record: object) -> Record:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (result,) = read(path)
    return result


def said(record: Record) -> list[tuple[str, str]]:
    assert isinstance(record, Conversation), record
    return [(m.role, m.content) for m in record.messages]


U, A = ("user", "u"), ("assistant", "a")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}, [U, A]),
        ({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}, [U, A]),
        ({"conversations": [{"from": "user", "value": "u"}, {"from": "assistant", "value": "a"}]}, [U, A]),
        ({"conversations": [{"from": "system", "value": "s"}, {"from": "tool", "value": "t"}]},
         [("system", "s"), ("tool", "t")]),
        ({"conversations": [{"role": "user", "content": "u"}]}, [U]),
        ({"system": "s", "conversations": [{"from": "human", "value": "u"}]}, [("system", "s"), U]),
        ({"turns": ["u", "v"]}, [U, ("user", "v")]),
        ({"prompt": "u"}, [U]),
        ({"prompt": "u", "input": "more"}, [("user", "u\n\nmore")]),
        ({"prompt": "u", "response": "a"}, [U, A]),
        ({"prompt": [{"role": "user", "content": "u"}],
          "completion": [{"role": "assistant", "content": "a"}]}, [U, A]),
        ({"question": "u", "answer": "a"}, [U, A]),
        ({"instruction": "u", "question": "v"}, [U]),
        ({"instruction": "u", "input": "", "output": "a"}, [U, A]),
        ({"instruction": "u", "input": "more", "output": "a"}, [("user", "u\n\nmore"), A]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "uv"]}]},
         [("user", "uv")]),
        ({"messages": [{"role": r, "content": "x"} for r in ("developer", "tool", "function")]},
         [("developer", "x"), ("tool", "x"), ("function", "x")]),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []},
                       {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}][1:]},
         [("assistant", "")]),
        ({"messages": [{"role": "user", "content": ""}]}, [("user", "")]),
    ],
)  # fmt: skip
def test_forms_of_messages(tmp_path: Path, record: dict[str, Any], expected: list[tuple[str, str]]):
    assert said(read_one(tmp_path, record)) == expected


def test_turns_are_turns_and_messages_are_not(tmp_path: Path):
    turns = read_one(tmp_path, {"turns": ["u", "v"]})
    messages = read_one(tmp_path, {"messages": [{"role": "user", "content": t} for t in "uv"]})
    assert isinstance(turns, Conversation)
    assert isinstance(messages, Conversation)
    assert (turns.each_turn, messages.each_turn) == (True, False)
    assert turns.id != messages.id


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_tools_and_calls_are_kept(tmp_path: Path, key: str):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    record = read_one(
        tmp_path,
        {
            "messages": [
                {"role": "assistant", "content": "a", key: "r", "tool_calls": [call]},
                {"role": "tool", "content": "t", "tool_call_id": "1", "name": "f"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    )
    assert isinstance(record, Conversation)
    first, second = (m.as_dict() for m in record.messages)
    assert first[key] == first["reasoning_content"] == "r"
    assert first["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert (second["tool_call_id"], second["name"]) == ("1", "f")
    assert record.tools[0]["function"]["name"] == "f"


def test_tools_as_a_string_and_old_function_calls(tmp_path: Path):
    record = read_one(
        tmp_path,
        {
            "messages": [
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
            ],
            "tools": '[{"name": "f"}]',
        },
    )
    assert isinstance(record, Conversation)
    assert record.tools == ({"name": "f"},)
    assert record.messages[0].tool_calls[0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("record", "tokens", "spans", "reason"),
    [
        ({"input_ids": [1, 2, 3], "spans": [[1, 3]]}, [1, 2, 3], ((1, 3),), "given"),
        ({"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1]}, [1, 2, 3, 4], ((1, 2), (3, 4)), "given"),
        ({"input_ids": [1, 2, 3], "loss_mask": [True, True, False]}, [1, 2, 3], ((0, 2),), "given"),
        ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, [1, 2, 3], ((1, 3),), "given"),
        ({"input_ids": [1, 2], "spans": []}, [1, 2], (), "given"),
        ({"input_ids": [1, 2, 3, 4], "spans": [[1, 2], [2, 4]]}, [1, 2, 3, 4], ((1, 2), (2, 4)), "given"),
        ({"prompt_ids": [1], "output_ids": [2, 3]}, [1, 2, 3], ((1, 3),), "given"),
        ({"prompt_ids": [1], "output_ids": [2], "finish_reason": "length"}, [1, 2], ((1, 2),), "length"),
        ({"prompt_ids": [1], "output_ids": []}, [1], (), "given"),
        ({"input_ids": [1, 2], "spans": [[0, 2]], "attention_mask": [1, 1]}, [1, 2], ((0, 2),), "given"),
    ],
)
def test_forms_of_tokens(
    tmp_path: Path, record: dict[str, Any], tokens: list[int], spans: tuple[tuple[int, int], ...], reason: str
):
    row = read_one(tmp_path, record)
    assert isinstance(row, TokenRow), row
    assert (row.tokens.tolist(), row.spans, row.finish_reason) == (tokens, spans, reason)


@pytest.mark.parametrize(
    ("record", "kind", "says"),
    [
        ({"messages": [{"role": "wizard", "content": "u"}]}, "unknown role", "messages[0] has role 'wizard'"),
        ({"conversations": [{"from": "cat", "value": "u"}]}, "unknown role", "'cat'"),
        ({"messages": [{"content": "u"}]}, "unknown role", "None"),
        ({"messages": []}, "no messages", "empty"),
        ({"turns": []}, "no messages", "empty"),
        ({"messages": "hello"}, "unknown form", "a string, not a list"),
        ({"messages": ["hello"]}, "unknown form", "messages[0] is a string"),
        ({"text": "hello"}, "unknown form", "keys text"),
        ([1, 2], "unknown form", "not an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "unknown content part", "messages[0] part 0 is of type 'image_url'"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "unknown content", "an object"),
        ({"messages": [{"role": "user", "content": None}]}, "unknown content", "null"),
        ({"messages": [{"role": "user"}]}, "unknown content", "null"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "unknown content", "surrogate"),
        ({"messages": [{"role": "user", "content": "u", "name": "\udfff"}]}, "unknown content", "surrogate"),
        ({"messages": [{"role": "user", "content": "u"}], "tools": "{"}, "unknown content", "tools"),
        ({"messages": [{"role": "user", "content": "u"}], "tools": [1]}, "unknown content", "tools"),
        ({"input_ids": [1, 2]}, "wrong token row", "without spans"),
        ({"input_ids": [], "spans": []}, "wrong token row", "empty"),
        ({"input_ids": [1, 2], "spans": [[1, 3]]}, "wrong token row", "[1, 3) does not lie in 2 tokens"),
        ({"input_ids": [1, 2], "spans": [[-1, 1]]}, "wrong token row", "does not lie"),
        ({"input_ids": [1, 2], "spans": [[1, 1]]}, "wrong token row", "does not lie"),
        ({"input_ids": [1, 2, 3], "spans": [[1, 3], [2, 3]]}, "wrong token row", "overlaps"),
        ({"input_ids": [1, 2], "spans": [[0, 1.5]]}, "wrong token row", "pair"),
        ({"input_ids": [1, 2], "spans": [[0]]}, "wrong token row", "pair"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "wrong token row", "1 entries, input_ids has 2"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "wrong token row", "other than 0 and 1"),
        ({"input_ids": [1, 2], "labels": [-100, 1]}, "wrong token row", "labels[1] is 1, input_ids[1] is 2"),
        ({"input_ids": [1, -2], "spans": [[0, 1]]}, "wrong token row", "input_ids[1] is -2"),
        ({"input_ids": [1, 100], "spans": [[0, 1]]}, "wrong token row", "vocabulary of 100"),
        ({"input_ids": [1, True], "spans": [[0, 1]]}, "wrong token row", "not an integer"),
        ({"input_ids": [1, 2.0], "spans": [[0, 1]]}, "wrong token row", "not an integer"),
        ({"input_ids": "12", "spans": [[0, 1]]}, "wrong token row", "not a list"),
        ({"input_ids": [1, 2], "spans": [[0, 2]], "attention_mask": [1, 0]}, "wrong token row", "padding"),
        ({"input_ids": [1, 2], "spans": [[0, 2]], "attention_mask": [1]}, "wrong token row", "length"),
        ({"prompt_ids": [1]}, "wrong token row", "without output_ids"),
        ({"prompt_ids": [], "output_ids": [1]}, "wrong token row", "prompt_ids is empty"),
        ({"prompt_ids": [1], "output_ids": [100]}, "wrong token row", "output_ids[0] is 100"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path: Path, record: object, kind: str, says: str):
    result = read_one(tmp_path, record)
    assert isinstance(result, Unreadable), result
    assert result.kind == kind
    assert says in result.detail
    error = result.error()
    assert isinstance(error, DataError)
    assert error.exit_code == 2
    assert str(error.where).endswith("one.jsonl:1")
    assert kind in error.what
    assert "on_unreadable" in str(error.hint)


GOOD = '{"prompt": "u"}\n'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (GOOD + "{nonsense\n" + GOOD, [None, ("not JSON", 2), None]),
        (GOOD + '{"prompt": "u', [None, ("torn last line", 2)]),
        (GOOD + GOOD.rstrip("\n"), [None, None]),
        ("\n" + GOOD + "  \n" + "[\n", [None, ("not JSON", 4)]),
        ("", [("empty file", 1)]),
        ("\n\n", [("empty file", 1)]),
        ("\ufeff" + GOOD, [None]),
        (GOOD + "[" * 100_000 + "\n", [None, ("not JSON", 2)]),
    ],
)
@pytest.mark.parametrize("compress", [False, True])
def test_lines(tmp_path: Path, content: str, expected: list[tuple[str, int] | None], compress: bool):
    path = tmp_path / ("a.jsonl.gz" if compress else "a.jsonl")
    path.write_bytes(gzip.compress(content.encode()) if compress else content.encode())
    found = [(r.kind, r.line) if isinstance(r, Unreadable) else None for r in read(path)]
    assert found == expected


def test_bytes_that_are_no_text(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD.encode() + b'{"prompt": "\xff"}\n' + GOOD.encode())
    good, bad, also_good = read(path)
    assert isinstance(bad, Unreadable)
    assert (bad.kind, bad.line) == ("not UTF-8", 2)
    assert said(good) == said(also_good) == [U]


def test_a_line_separator_inside_text_does_not_end_a_record(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert [said(r) for r in read(path)] == [[("user", "a\u2028b\u0085c")]]


@pytest.mark.parametrize("damage", ["cut", "flipped", "not gzip"])
def test_a_damaged_gzip_gives_what_it_can_and_is_named(tmp_path: Path, damage: str):
    lines = "".join(json.dumps({"prompt": f"question {i * i * 7919}"}) + "\n" for i in range(3000))
    packed = bytearray(gzip.compress(lines.encode()))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    else:
        packed = bytearray(GOOD.encode())
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(packed)
    *_, last = read(path)
    assert isinstance(last, Unreadable)
    assert last.kind in ("damaged gzip", "not JSON", "not UTF-8")
    assert any(isinstance(r, Unreadable) and r.kind == "damaged gzip" for r in read(path))


def test_a_compressed_file_without_the_ending_is_read(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(GOOD.encode()))
    assert [said(r) for r in read(path)] == [[U]]


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match="cannot be opened") as caught:
        read(tmp_path / "none.jsonl")
    assert "none.jsonl" in str(caught.value.where)


def test_domain_is_the_records_own_then_the_configured_then_its_source(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"prompt": "a", "domain": "maths", "source": "x"}\n{"prompt": "b", "source": "x"}\n{"prompt": "c"}\n'
    )

    def domains(configured: str | None) -> list[str]:
        records = read_source(path, name="src", vocab_size=9, domain=configured)
        return [r.domain for r in records]

    assert domains(None) == ["maths", "x", "src"]
    assert domains("general") == ["maths", "general", "general"]


def test_the_reader_tells_how_far_it_is(tmp_path: Path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD.encode() * 50))
    reader = SourceReader(path, name="s", domain=None, vocab_size=9)
    assert reader.num_bytes == path.stat().st_size
    assert len(list(reader)) == 50
    assert 0 < reader.bytes_read <= reader.num_bytes


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["messages", "conversations", "turns", "prompt", "question", "instruction", "input", "output", "tools",
     "system", "input_ids", "spans", "labels", "loss_mask", "prompt_ids", "output_ids", "attention_mask",
     "id", "domain"]
)  # fmt: skip
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "from", "content", "value", "tool_calls", "function_call", "reasoning", "name"]),
    st.sampled_from(["user", "assistant", "tool"]) | JSON,
)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(KEYS, JSON | st.lists(MESSAGE, max_size=3) | st.lists(st.integers(-2, 101), max_size=4))
)
def test_any_record_is_read_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, record: dict[str, Any]
):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (result,) = read(path)
    if isinstance(result, Unreadable):
        assert result.kind
        assert result.detail
    elif isinstance(result, TokenRow):
        assert all(0 <= s < e <= len(result.tokens) for s, e in result.spans)
        assert all(0 <= t < VOCAB_SIZE for t in result.tokens)
    else:
        assert result.messages
        assert len(result.id) == 32
