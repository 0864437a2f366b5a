"""Regenerated dialogues: what is asked, what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.base.errors import DamageFound
from eyas.chat.conversation import Conversation, DialoguePrompts, Message
from eyas.chat.dialogue import Dialogue, EmittedAnswer, read_dialogues
from eyas.chat.render import Renderer
from tests.chat.tokenizers import end_tokens, make_tokenizer

TOKENIZER = make_tokenizer("chatml")
RENDERER = Renderer(TOKENIZER, end_tokens("chatml"))
END = end_tokens("chatml")[0]


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def turns(*messages: tuple[str, str] | Message, each_turn: bool = False) -> list[list[tuple[str, str]]]:
    made = tuple(m if isinstance(m, Message) else Message(*m) for m in messages)
    prompts = Conversation(made, each_turn=each_turn).dialogue()
    return [] if prompts is None else [[(m.role, m.content) for m in turn] for turn in prompts.turns]


def test_given_answers_are_dropped_and_their_places_kept():
    assert turns(
        ("system", "s"), ("user", "u"), ("assistant", "a"), ("system", "t"), ("user", "v"), ("assistant", "b")
    ) == [[("system", "s"), ("user", "u")], [("system", "t"), ("user", "v")]]


def test_messages_in_a_row_are_one_turn_unless_every_one_is_meant_as_a_turn():
    row = (("user", "u"), ("user", "v"))
    assert turns(*row) == [[("user", "u"), ("user", "v")]]
    assert turns(*row, each_turn=True) == [[("user", "u")], [("user", "v")]]


def test_a_call_stays_with_its_result():
    call = Message("assistant", "", tool_calls=({"function": {"name": "f"}},))
    assert turns(("user", "u"), call, ("tool", "r"), ("assistant", "a"), ("user", "v")) == [
        [("user", "u"), ("assistant", ""), ("tool", "r")],
        [("user", "v")],
    ]


@pytest.mark.parametrize(
    "messages", [(("system", "s"),), (("assistant", "a"),), (("system", "s"), ("assistant", "a"))]
)
def test_where_nothing_is_asked_there_is_no_dialogue(messages: tuple[tuple[str, str], ...]):
    assert turns(*messages) == []


def test_an_opening_answer_and_a_closing_system_message_ask_for_nothing():
    assert turns(("assistant", "hi"), ("user", "u"), ("assistant", "a"), ("system", "t")) == [[("user", "u")]]


def two_turns() -> Dialogue:
    prompts = Conversation(
        (Message("user", "u"), Message("assistant", "given"), Message("user", "v"))
    ).dialogue()
    assert prompts is not None
    return Dialogue(RENDERER, prompts)


def test_the_next_prompt_holds_the_emitted_answer_as_text():
    answer = EmittedAnswer((*ids("one"), END), "stop")
    assert two_turns().next_prompt([]) == ids("<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n")
    assert two_turns().next_prompt([answer]) == ids(
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\n"
    )
    assert two_turns().next_prompt([answer, answer]) is None


def test_turns_that_continue_each_other_are_one_sample_with_the_emitted_ids():
    answer = EmittedAnswer((*ids("one"), END), "stop")
    (sample,) = two_turns().samples([answer, answer])
    assert [sample.tokens[s:e] for s, e in sample.spans] == [list(answer.tokens)] * 2
    assert sample.tokens[: sample.spans[1][0]] == two_turns().next_prompt([answer])


def test_ids_that_text_would_not_give_are_kept_and_the_next_turn_is_a_sample_of_its_own():
    apart = [*ids("t"), *ids("h"), *ids("e")]
    assert apart != ids("the")
    first, second = two_turns().samples(
        [EmittedAnswer((*apart, END), "stop"), EmittedAnswer((*ids("two"), END), "stop")]
    )
    assert first.tokens[first.spans[0][0] :] == [*apart, END]
    assert second.tokens[: second.spans[0][0]] == two_turns().next_prompt(
        [EmittedAnswer((*apart, END), "stop")]
    )


def test_a_special_token_inside_an_answer_is_kept_in_the_sample_and_not_sent_back():
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    answer = EmittedAnswer((*ids("a"), start, *ids("b"), END), "stop")
    prompt = two_turns().next_prompt([answer])
    assert prompt is not None
    assert TOKENIZER.decode(prompt).startswith(
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\nab<|im_end|>"
    )
    assert two_turns().samples([answer])[0].tokens[-4:] == list(answer.tokens)[-4:]


def test_a_cut_answer_is_followed_by_the_templates_end_token_which_is_not_supervised():
    cut = EmittedAnswer(tuple(ids("one")), "length")
    (sample,) = two_turns().samples([cut, EmittedAnswer((*ids("two"), END), "stop")])
    (_, end), _ = sample.spans
    assert sample.tokens[end] == END
    assert sample.finish_reason == "stop"
    assert two_turns().samples([cut])[0].finish_reason == "length"


@pytest.mark.parametrize("tokens", [(), (END,)])
def test_an_answer_that_says_nothing_is_not_supervised(tokens: tuple[int, ...]):
    assert two_turns().samples([EmittedAnswer(tokens, "stop")]) == []
    (sample,) = two_turns().samples(
        [EmittedAnswer(tokens, "stop"), EmittedAnswer((*ids("two"), END), "stop")]
    )
    assert [sample.tokens[s:e] for s, e in sample.spans] == [[*ids("two"), END]]


def test_dialogues_come_back_from_their_file(tmp_path: Path):
    prompts = DialoguePrompts(
        turns=(
            (Message("system", "s\u2028"), Message("user", "<|im_end|>\n")),
            (
                Message("assistant", "", reasoning="r", reasoning_key="thinking", tool_calls=({"id": "1"},)),
                Message("tool", "x", extra={"name": "f", "tool_call_id": "1"}),
            ),
        ),
        tools=({"function": {"name": "f"}},),
        source="a",
        domain="b",
        split="validation",
    )
    path = tmp_path / "conversations.jsonl"
    path.write_text(json.dumps(prompts.as_dict(), ensure_ascii=False) + "\n", encoding="utf-8")
    (again,) = read_dialogues(path)
    assert again.id == prompts.id
    assert [[m.as_dict() for m in t] for t in again.turns] == [
        [m.as_dict() for m in t] for t in prompts.turns
    ]
    assert (again.source, again.domain, again.split, again.tools) == ("a", "b", "validation", prompts.tools)


@pytest.mark.parametrize("line", ['{"turns": []', "[]", '{"turns":[[{"role":"x","content":""}]]}'])
def test_a_damaged_file_of_dialogues_is_named(tmp_path: Path, line: str):
    path = tmp_path / "conversations.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DamageFound) as caught:
        list(read_dialogues(path))
    assert str(caught.value.where).endswith("conversations.jsonl:1")
