"""Span exactness for any conversation, against plain string building and against serving's prompts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.chat.conversation import Conversation, Message
from eyas.chat.dialogue import Dialogue, EmittedAnswer
from eyas.chat.render import Renderer
from tests.chat.tokenizers import (
    ADDED_TEXT,
    SPECIALS,
    answer_by,
    end_tokens,
    make_tokenizer,
    supervised_texts,
    written_by,
)

PIECES = st.sampled_from(
    [*SPECIALS, *ADDED_TEXT, "\n", "\n\n", " ", "<|im_start|>assistant\n", "<|im_", "end|>", "ASSISTANT:",
     "the", "assistant", "é", "e\u0301", "\u0301", "🦅", "\u200d", "日本", "\U000f0000", "\u2028", "\x00"]
)  # fmt: skip
CONTENT = st.one_of(
    st.lists(PIECES, max_size=8).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.lists(st.tuples(ROLES, CONTENT), min_size=1, max_size=7)
ALTERNATING = st.lists(CONTENT, min_size=2, max_size=6).map(
    lambda texts: [("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(texts)]
)


def check(template: str, given_messages: list[tuple[str, str]]) -> None:
    tokenizer = make_tokenizer(template)
    renderer = Renderer(tokenizer, end_tokens(template))
    messages = [Message(*pair) for pair in given_messages]
    samples = renderer.samples(Conversation(tuple(messages)))
    special = set(tokenizer.convert_tokens_to_ids(list(SPECIALS)))
    supervised = [
        i for i, (role, content) in enumerate(given_messages) if i and role == "assistant" and content.strip()
    ]
    assert sum(len(sample.spans) for sample in samples) == len(supervised)

    opening = "<|begin|>" if template == "llama3" else ""
    answers = iter(supervised)
    for sample in samples:
        texts = supervised_texts(tokenizer, sample.tokens, sample.spans)
        index = -1
        for (start, end), text in zip(sample.spans, texts, strict=True):
            index = next(answers)
            content = given_messages[index][1]
            # exactly the content and its end token, both as text and in special tokens
            assert text == answer_by(template, content)
            inside = [token for token in sample.tokens[start:end] if token in special]
            assert inside == [sample.tokens[end - 1]]
            # serving would have sent exactly these ids before the answer
            assert sample.tokens[:start] == renderer.prompt_ids(messages[:index])
        # everything together is what the template writes, with nothing after the last end token
        whole = opening + "".join(written_by(template, *pair) for pair in given_messages[: index + 1])
        assert tokenizer.decode(sample.tokens, clean_up_tokenization_spaces=False) == whole.removesuffix("\n")
    assert next(answers, None) is None


@settings(max_examples=100, deadline=None)
@given(MESSAGES)
def test_chatml(messages: list[tuple[str, str]]):
    check("chatml", messages)


@settings(max_examples=100, deadline=None)
@given(MESSAGES)
def test_llama3(messages: list[tuple[str, str]]):
    check("llama3", messages)


@settings(max_examples=100, deadline=None)
@given(ALTERNATING)
def test_gemma(messages: list[tuple[str, str]]):
    check("gemma", messages)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(CONTENT, CONTENT, CONTENT), min_size=1, max_size=3))
def test_dropped_reasoning(turns: list[tuple[str, str, str]]):
    """Every answer is trained on as serving would see it: own reasoning in, earlier reasoning out."""
    tokenizer = make_tokenizer("qwen3")
    renderer = Renderer(tokenizer, end_tokens("qwen3"))
    messages: list[Message] = []
    for asked, reasoning, said in turns:
        messages += [Message("user", asked), Message("assistant", said, reasoning=reasoning)]
    samples = renderer.samples(Conversation(tuple(messages)))
    found = [
        (sample.tokens[:start], text)
        for sample in samples
        for (start, _), text in zip(
            sample.spans, supervised_texts(tokenizer, sample.tokens, sample.spans), strict=True
        )
    ]
    expected = []
    for index, (_, reasoning, said) in enumerate(turns):
        if not (said.strip() or reasoning.strip()):
            continue
        if not reasoning and "</think>" in said:
            reasoning = said.split("</think>")[0].split("<think>")[-1].strip("\n")
            said = said.split("</think>")[-1].lstrip("\n")
        stripped = reasoning.strip("\n")
        thought = f"<think>\n{stripped}\n</think>\n\n" if reasoning else ""
        expected.append((renderer.prompt_ids(messages[: 2 * index + 1]), f"{thought}{said}<|im_end|>"))
    assert found == expected


@settings(max_examples=100, deadline=None)
@given(MESSAGES, st.lists(st.lists(st.integers(12, 419), max_size=6), min_size=7, max_size=7), st.booleans())
def test_emitted_ids_are_kept_and_each_follows_its_own_prompt(
    messages: list[tuple[str, str]], emitted: list[list[int]], cut: bool
):
    tokenizer = make_tokenizer("chatml")
    end = end_tokens("chatml")[0]
    renderer = Renderer(tokenizer, end_tokens("chatml"))
    prompts = Conversation(tuple(Message(*pair) for pair in messages)).dialogue()
    if prompts is None:
        assert not any(role in ("user", "tool") for role, _ in messages)
        return
    dialogue = Dialogue(renderer, prompts)
    answers: list[EmittedAnswer] = []
    wanted = []
    while (prompt := dialogue.next_prompt(answers)) is not None:
        ids = emitted[len(answers) % len(emitted)]
        answers.append(EmittedAnswer(tuple(ids), "length") if cut else EmittedAnswer((*ids, end), "stop"))
        if ids:
            wanted.append((prompt, list(answers[-1].tokens)))
    assert len(answers) == dialogue.num_turns
    samples = dialogue.samples(answers)
    got = [(s.tokens[:start], s.tokens[start:stop]) for s in samples for start, stop in s.spans]
    assert got == wanted
    assert all(s.finish_reason == ("length" if cut else "stop") for s in samples)
