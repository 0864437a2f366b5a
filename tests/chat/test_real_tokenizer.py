"""The same exactness with a real target's tokenizer; set EYAS_TEST_MODEL to its folder."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from eyas.chat.conversation import Conversation, Message
from eyas.chat.identity import chat_template_hash, tokenizer_hash
from eyas.chat.render import Renderer
from tests.chat.test_render_properties import MESSAGES
from tests.chat.tokenizers import make_tokenizer, supervised_texts

MODEL = os.environ.get("EYAS_TEST_MODEL", "")
needs_model = pytest.mark.skipif(not MODEL, reason="EYAS_TEST_MODEL does not name a model folder")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@needs_model
def test_the_targets_own_system_prompt_stays_since_serving_adds_it_too(tokenizer: Any):
    renderer = Renderer(tokenizer, (tokenizer.eos_token_id,))
    ids = renderer.prompt_ids([Message("user", "hello")])
    served = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_dict=False
    )
    assert ids == served


@needs_model
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MESSAGES)
def test_spans_hold_content_and_end_token(tokenizer: Any, messages: list[tuple[str, str]]):
    end = tokenizer.eos_token_id
    renderer = Renderer(tokenizer, (end,))
    made = tuple(Message(*pair) for pair in messages)
    samples = renderer.samples(Conversation(made))
    expected = [
        (index, content)
        for index, (role, content) in enumerate(messages)
        if index and role == "assistant" and content.strip()
    ]
    found = [
        (sample.tokens[:start], sample.tokens[start:stop])
        for sample in samples
        for start, stop in sample.spans
    ]
    assert len(found) == len(expected)
    for (before, answer), (index, content) in zip(found, expected, strict=True):
        assert before == renderer.prompt_ids(made[:index])
        assert answer[-1] == end
        assert not set(answer[:-1]) & set(tokenizer.added_tokens_decoder)
        # some real vocabularies have no token for some bytes, and leave these out
        known = tokenizer(content, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert supervised_texts(tokenizer, answer, [(0, len(answer) - 1)]) == [tokenizer.decode(known)]


def test_identity_follows_content_not_state():
    first, second = make_tokenizer("chatml"), make_tokenizer("llama3")
    assert tokenizer_hash(first) == tokenizer_hash(second)
    assert chat_template_hash(first) != chat_template_hash(second)
    assert chat_template_hash(make_tokenizer(None)) is None
    assert tokenizer_hash(first) != tokenizer_hash(make_tokenizer("chatml", "metaspace"))
    before = tokenizer_hash(first)
    first("long text " * 20, truncation=True, max_length=4)
    assert first.backend_tokenizer.truncation is not None
    assert tokenizer_hash(first) == before
    first.backend_tokenizer.no_truncation()
