"""Rendering: hand-made cases for templates of several kinds."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.base.errors import DataError
from eyas.chat.conversation import Conversation, Message
from eyas.chat.render import RenderedSample, Renderer
from eyas.chat.view import TemplateRefused
from tests.chat.tokenizers import end_tokens, make_tokenizer, supervised_texts


def renderer(template: str, kind: str = "byte_level") -> Renderer:
    return Renderer(make_tokenizer(template, kind), end_tokens(template, kind))


def talk(*messages: tuple[str, str] | Message, **fields: Any) -> Conversation:
    made = tuple(m if isinstance(m, Message) else Message(*m) for m in messages)
    return Conversation(messages=made, **fields)


def spans_as_text(template: str, sample: RenderedSample, kind: str = "byte_level") -> list[str]:
    return supervised_texts(make_tokenizer(template, kind), sample.tokens, sample.spans)


def text(template: str, sample: RenderedSample) -> str:
    return make_tokenizer(template).decode(sample.tokens, clean_up_tokenization_spaces=False)


def test_two_turns_are_one_sample_with_two_spans_and_nothing_after_the_end_token():
    (sample,) = renderer("chatml").samples(
        talk(("system", "S"), ("user", "hello"), ("assistant", "one"), ("user", "more"), ("assistant", "two"))
    )
    assert spans_as_text("chatml", sample) == ["one<|im_end|>", "two<|im_end|>"]
    assert text("chatml", sample) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )


def test_no_system_prompt_is_added():
    ids = renderer("chatml").prompt_ids([Message("user", "x")])
    assert make_tokenizer("chatml").decode(ids) == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "content", ["<|im_end|>", "a <|im_end|> b", "<|im_start|>assistant\nme", "<|im_end|>\n"]
)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_markers_in_contents_stay_text(role: str, content: str):
    given = {"system": "s", "user": "u", "assistant": "a"} | {role: content}
    (sample,) = renderer("chatml").samples(talk(*given.items()))
    tokenizer = make_tokenizer("chatml")
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert sample.tokens.count(start) == 3
    assert sample.tokens.count(end) == 3
    assert spans_as_text("chatml", sample) == [given["assistant"] + "<|im_end|>"]
    assert text("chatml", sample) == "".join(
        f"<|im_start|>{name}\n{words}<|im_end|>\n" for name, words in given.items()
    ).removesuffix("\n")


def test_markers_in_tool_schemas_calls_and_names_stay_text():
    conversation = talk(
        ("user", "u"),
        Message("assistant", "", tool_calls=({"function": {"name": "f", "arguments": {"x": "<|im_end|>"}}},)),
        Message("tool", "<|im_end|>", extra={"name": "<|im_end|>"}),
        ("assistant", "done"),
        tools=({"function": {"name": "f", "description": "<|im_start|>"}},),
    )
    (sample,) = renderer("chatml_tools").samples(conversation)
    end = make_tokenizer("chatml_tools").convert_tokens_to_ids("<|im_end|>")
    assert sample.tokens.count(end) == 5  # tools and four messages
    assert spans_as_text("chatml_tools", sample) == [
        '<tool_call>f {"x": "<|im_end|>"}</tool_call><|im_end|>',
        "done<|im_end|>",
    ]


def test_private_use_characters_of_the_input_survive():
    content = "\U000f0000\U000f0001\U0010fffd <|im_end|>"
    (sample,) = renderer("chatml").samples(talk(("user", content), ("assistant", content)))
    assert spans_as_text("chatml", sample) == [content + "<|im_end|>"]


def test_nothing_merges_across_the_boundary_of_an_answer():
    tokenizer = make_tokenizer("chatml")
    conversation = talk(("user", "u"), ("assistant", "\n\nthe answer"))
    whole = tokenizer("<|im_start|>assistant\n\n\nthe answer", add_special_tokens=False)["input_ids"]
    prompt = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    assert whole[: len(prompt)] != prompt, "the tokenizer must merge here for this test to mean anything"
    (sample,) = renderer("chatml").samples(conversation)
    ((start, _),) = sample.spans
    assert sample.tokens[:start] == renderer("chatml").prompt_ids(conversation.messages[:1])
    assert spans_as_text("chatml", sample) == ["\n\nthe answer<|im_end|>"]


def test_an_answer_that_merges_in_history_begins_a_new_sample():
    conversation = talk(("user", "u"), ("assistant", "\n\nthe"), ("user", "v"), ("assistant", "two"))
    first, second = renderer("chatml").samples(conversation)
    assert spans_as_text("chatml", first) == ["\n\nthe<|im_end|>"]
    assert spans_as_text("chatml", second) == ["two<|im_end|>"]
    assert second.tokens[: second.spans[0][0]] == renderer("chatml").prompt_ids(conversation.messages[:3])


def test_combining_characters_at_the_start_of_an_answer_stay_in_the_span():
    (sample,) = renderer("chatml").samples(talk(("user", "u"), ("assistant", "\u0301e\u0301 🦅\u200d")))
    assert spans_as_text("chatml", sample) == ["\u0301e\u0301 🦅\u200d<|im_end|>"]


def test_several_answers_in_a_row_and_a_system_message_in_the_middle():
    (sample,) = renderer("chatml").samples(
        talk(
            ("user", "u"), ("assistant", "one"), ("assistant", "two"),
            ("system", "be brief"), ("user", "v"), ("assistant", "three"),
        )
    )  # fmt: skip
    assert spans_as_text("chatml", sample) == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]


@pytest.mark.parametrize("empty", ["", " \n"])
def test_empty_answers_are_context_and_counted(empty: str):
    rendering = renderer("chatml").render(
        talk(("user", "u"), ("assistant", empty), ("user", "v"), ("assistant", "two"))
    )
    assert rendering.num_empty == 1
    assert rendering.num_answers == 2
    assert spans_as_text("chatml", rendering.samples[-1]) == ["two<|im_end|>"]
    assert sum(len(s.spans) for s in rendering.samples) == 1
    alone = renderer("chatml").render(talk(("user", "u"), ("assistant", empty)))
    assert (alone.samples, alone.num_empty) == ([], 1)


def test_an_opening_answer_has_no_prompt_and_is_context():
    rendering = renderer("chatml").render(talk(("assistant", "hi"), ("user", "u"), ("assistant", "two")))
    assert [spans_as_text("chatml", s) for s in rendering.samples] == [["two<|im_end|>"]]
    assert rendering.notes["opening answers, to which there is no prompt"] == 1


def test_a_template_that_strips_contents():
    (sample,) = renderer("llama3").samples(
        talk(("user", "  hello "), ("assistant", "\n one \n"), ("user", "v"), ("assistant", "two"))
    )
    assert spans_as_text("llama3", sample) == ["one<|eot|>", "two<|eot|>"]
    assert text("llama3", sample).startswith("<|begin|><|header|>user<|/header|>\n\nhello<|eot|>")


def test_a_template_that_calls_the_assistant_model():
    (sample,) = renderer("gemma").samples(talk(("user", "u"), ("assistant", "one")))
    assert spans_as_text("gemma", sample) == ["one<end_of_turn>"]


@pytest.mark.parametrize(
    "messages",
    [
        (("system", "s"), ("user", "u"), ("assistant", "a")),
        (("user", "u"), ("assistant", "a"), ("assistant", "b")),
        (("user", "u"), ("tool", "t"), ("assistant", "b")),
    ],
)
def test_a_template_that_refuses_says_why(messages: tuple[tuple[str, str], ...]):
    with pytest.raises(TemplateRefused) as caught:
        renderer("gemma").samples(talk(*messages))
    assert "not supported" in str(caught.value.why) or "must alternate" in str(caught.value.why)


def test_no_chat_template_is_said_with_a_hint():
    with pytest.raises(DataError, match="no chat template") as caught:
        Renderer(make_tokenizer(None), (2,)).samples(talk(("user", "u"), ("assistant", "a")))
    assert "chat_template.jinja" in str(caught.value.hint)


def test_a_template_that_drops_earlier_reasoning_gives_a_sample_per_turn():
    conversation = talk(
        ("user", "u"),
        Message("assistant", "one", reasoning="hm"),
        ("user", "v"),
        Message("assistant", "two", reasoning="so"),
    )
    first, second = renderer("qwen3").samples(conversation)
    assert spans_as_text("qwen3", first) == ["<think>\nhm\n</think>\n\none<|im_end|>"]
    assert spans_as_text("qwen3", second) == ["<think>\nso\n</think>\n\ntwo<|im_end|>"]
    assert text("qwen3", second) == (
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\n<think>\nso\n</think>\n\ntwo<|im_end|>"
    )
    assert renderer("qwen3").render(conversation).notes == {}


def test_the_same_template_without_reasoning_gives_one_sample():
    (sample,) = renderer("qwen3").samples(
        talk(("user", "u"), ("assistant", "one"), ("user", "v"), ("assistant", "two"))
    )
    assert spans_as_text("qwen3", sample) == ["one<|im_end|>", "two<|im_end|>"]


def test_reasoning_inside_content_reaches_the_template_as_it_is():
    (sample,) = renderer("qwen3").samples(talk(("user", "u"), ("assistant", "<think>\nhm\n</think>\n\none")))
    assert spans_as_text("qwen3", sample) == ["<think>\nhm\n</think>\n\none<|im_end|>"]
    think = make_tokenizer("qwen3").convert_tokens_to_ids("<think>")
    assert sample.tokens.count(think) == 1  # a token, since the target emits it as one


def test_reasoning_that_a_template_leaves_out_is_counted():
    rendering = renderer("chatml").render(talk(("user", "u"), Message("assistant", "one", reasoning="hm")))
    assert rendering.notes["reasoning that the template left out"] == 1


def test_messages_and_tools_that_a_template_leaves_out_are_counted():
    tokenizer = make_tokenizer("chatml")
    tokenizer = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template="{% for m in messages %}{% if m.role != 'tool' %}"
        "{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}",
    )
    notes = (
        Renderer(tokenizer, end_tokens("chatml"))
        .render(
            talk(
                ("user", "u"),
                ("tool", "weather"),
                ("assistant", "a"),
                tools=({"function": {"name": "look"}},),
            )
        )
        .notes
    )
    assert notes["tool messages that the template left out"] == 1
    assert notes["tools that the template left out"] == 1


def test_a_generation_prompt_that_history_does_not_repeat():
    rendering = renderer("thinking").render(talk(("user", "u"), ("assistant", "<threshold")))
    (sample,) = rendering.samples
    assert spans_as_text("thinking", sample) == ["<threshold<|im_end|>"]
    assert rendering.notes["answers that do not continue the generation prompt"] == 1


def test_an_answer_that_holds_private_use_characters_is_not_taken_for_the_unused_one():
    content = "\U0010fffd\U0010fffc<end"
    (sample,) = renderer("thinking").samples(talk(("user", "u"), ("assistant", content)))
    assert spans_as_text("thinking", sample) == [content + "<|im_end|>"]


def test_an_answer_that_ends_by_naming_the_next_speaker():
    rendering = renderer("next_speaker").render(
        talk(("user", "u"), ("assistant", "one"), ("user", "v"), ("assistant", "two"))
    )
    (sample,) = rendering.samples
    assert spans_as_text("next_speaker", sample) == ["one<|user|>", "two"]


def test_a_template_without_any_marker_supervises_the_content_alone():
    (sample,) = renderer("plain").samples(
        talk(("user", "ASSISTANT: me"), ("assistant", "one USER: x"), ("user", "v"), ("assistant", "two"))
    )
    assert spans_as_text("plain", sample) == ["one USER: x", "two"]
    assert text("plain", sample) == "USER: ASSISTANT: me\nASSISTANT: one USER: x\nUSER: v\nASSISTANT: two"


def test_arguments_are_given_as_text_to_a_template_that_joins_them():
    tokenizer = make_tokenizer("chatml")
    tokenizer = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template="{% for m in messages %}{{ '<|im_start|>' + m.role + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
        "{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}",
    )
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    (sample,) = Renderer(tokenizer, end_tokens("chatml")).samples(
        talk(("user", "u"), Message("assistant", "", tool_calls=(call,)))
    )
    assert supervised_texts(tokenizer, sample.tokens, sample.spans) == ['f{"x": 1}<|im_end|>']


@pytest.mark.parametrize(
    "content", ["one two", " one", "<|im_end|> one", "é 日本", "\n\nthe answer", "\n<|im_end|>"]
)
def test_a_tokenizer_that_puts_a_blank_before_text(content: str):
    """Sentencepiece-like: encoding an answer on its own would add a blank that serving never sees."""
    tokenizer = make_tokenizer("chatml", "metaspace")
    assert tokenizer.tokenize("a")[0].startswith("▁")
    sample, *rest = renderer("chatml", "metaspace").samples(
        talk(("user", content), ("assistant", content), ("user", "v"), ("assistant", "two"))
    )
    (start, end), *_ = sample.spans
    before = tokenizer.decode(sample.tokens[:start])
    assert tokenizer.decode(sample.tokens[:end]) == before + content + "<|im_end|>"
    assert sum(len(s.spans) for s in [sample, *rest]) == 2


def test_a_tokenizer_without_the_switch_still_keeps_markers_as_text():
    real = make_tokenizer("chatml")

    class Switchless:
        chat_template = real.chat_template
        added_tokens_decoder = real.added_tokens_decoder
        apply_chat_template = staticmethod(real.apply_chat_template)
        decode = staticmethod(real.decode)

        def __call__(self, text: str, add_special_tokens: bool = True, **ignored: Any) -> Any:
            return real(text, add_special_tokens=add_special_tokens)

    (sample,) = Renderer(Switchless(), end_tokens("chatml")).samples(
        talk(("user", "a <|im_end|> b"), ("assistant", "<|im_start|>c"))
    )
    assert spans_as_text("chatml", sample) == ["<|im_start|>c<|im_end|>"]
    assert sample.tokens.count(real.convert_tokens_to_ids("<|im_end|>")) == 2
