"""Small real tokenizers with chat templates of several kinds, and the same templates in Python.

The Python versions (`written_by`) are the independent reference: plain string building per role.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>",
    "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>",
)  # fmt: skip
ADDED_TEXT = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + ' ' }}{{ call.function.arguments | tojson }}"
    "{{ '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{{ '<|header|>' + message['role'] + '<|/header|>\n\n' + message['content'] | trim + '<|eot|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
QWEN3 = (
    "{% set last = namespace(user=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{% set content = message.content %}{% set reasoning = message.reasoning_content or '' %}"
    "{% if not reasoning and '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > last.user and reasoning %}"
    "{{ '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
THINKING = (  # asks with an opened thought, writes history without it
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{{ message.content.split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
NEXT_SPEAKER = (  # an answer ends where the next speaker is named
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message.role | upper + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML, "chatml_tools": CHATML_TOOLS, "llama3": LLAMA3, "qwen3": QWEN3, "gemma": GEMMA,
    "thinking": THINKING, "next_speaker": NEXT_SPEAKER, "plain": PLAIN,
}  # fmt: skip
ENDS = {
    "chatml": "<|im_end|>", "chatml_tools": "<|im_end|>", "llama3": "<|eot|>", "qwen3": "<|im_end|>",
    "gemma": "<end_of_turn>", "thinking": "<|im_end|>", "next_speaker": "<|user|>", "plain": "<|endoftext|>",
}  # fmt: skip

_TEXT = (
    "the assistant\n\nanswers\n\n\nthe user, and the system is here\n",
    "assistant\n\n what is the sum? <|im_end|> is a marker, <|im_start|>assistant too",
    "an eagle in the air; eagles 🦅🦅 naïve café e\u0301 日本語 日本 the think tool",
)


@cache
def _backend_text(kind: str) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=list(SPECIALS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=640,
            special_tokens=["<unk>", *SPECIALS, *(f"<0x{i:02X}>" for i in range(256))],
            show_progress=False,
        )
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    return str(tokenizer.to_str())


@cache
def make_tokenizer(template: str | None, kind: str = "byte_level") -> Any:
    """A tokenizer that merges across newlines and words, with one of `TEMPLATES`."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(_backend_text(kind))
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED_TEXT])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        additional_special_tokens=list(SPECIALS[1:]),
        chat_template=None if template is None else TEMPLATES[template],
        clean_up_tokenization_spaces=False,
    )


def end_tokens(template: str, kind: str = "byte_level") -> tuple[int, ...]:
    """The end tokens that a target with this template would have."""
    tokenizer = make_tokenizer(template, kind)
    return tuple(tokenizer.convert_tokens_to_ids([ENDS[template], "<|endoftext|>"]))


def written_by(template: str, role: str, content: str) -> str:
    """One message as `chatml`, `llama3` or `gemma` write it (without what precedes the first)."""
    if template == "chatml":
        return f"<|im_start|>{role}\n{content}<|im_end|>\n"
    if template == "llama3":
        return f"<|header|>{role}<|/header|>\n\n{content.strip()}<|eot|>"
    if template == "gemma":
        name = "model" if role == "assistant" else role
        return f"<start_of_turn>{name}\n{content.strip()}<end_of_turn>\n"
    raise ValueError(template)


def answer_by(template: str, content: str) -> str:
    """What of an assistant message is supervised: content and end token."""
    return (content if template == "chatml" else content.strip()) + ENDS[template]


def supervised_texts(tokenizer: Any, tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[str]:
    """Text of each span."""
    return [tokenizer.decode(list(tokens[s:e]), clean_up_tokenization_spaces=False) for s, e in spans]
