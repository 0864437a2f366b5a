"""Streamed answers of the fake server, with a drafter that is pretended: rounds, pieces and counts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.targets.fake.dumps import TinyModel
from eyas.targets.local.generate import SamplingSettings


@dataclass(frozen=True)
class FakeDrafting:
    """A pretended drafter.

    Args:
        num_drafts: drafts of a round.
        accepts: accepted drafts of an answer's first, second, ... round; it begins again at its end.
    """

    num_drafts: int
    accepts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.accepts or not all(0 <= count <= self.num_drafts for count in self.accepts):
            raise ValueError(f"accepted drafts must be 0 to {self.num_drafts}, at least one number of them")


class Drafts:
    """What a server streams and counts."""

    def __init__(
        self, model: TinyModel, folder: Path, drafting: FakeDrafting | None, round_seconds: float
    ) -> None:
        self._model, self._folder = model, folder
        self._drafting, self._round_seconds = drafting, round_seconds
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._tokens = 0
        self._rounds = 0
        self._accepted_at = [0] * (drafting.num_drafts if drafting else 0)

    def prompt(self, path: str, body: dict[str, Any]) -> list[int]:
        """Token ids of a request's prompt."""
        if path == "/v1/completions":
            return [int(token) for token in body["prompt"]]
        found = self._text().apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=False
        )
        return [int(token) for token in found]

    def pieces(self, prompt: Sequence[int], body: dict[str, Any], engine: str, name: str) -> Iterator[bytes]:
        """An event stream: one piece of text for each round, then what was counted."""
        temperature = float(body.get("temperature", 0))
        ends = self._model.target.facts.end_tokens
        seeds = [int(body.get("seed") or 0)] if temperature else ()
        limit = int(body["max_tokens"])
        made = self._model.answer(prompt, SamplingSettings(limit, ends, temperature, 1.0, seeds))
        shown, done, histogram = "", 0, [0] * (len(self._accepted_at) + 1)
        for size in self._sizes(len(made.tokens)):
            time.sleep(self._round_seconds)
            if done:  # the first token comes from the prompt: no round
                histogram[size - 1] += 1
            done += size
            text = self._text().decode(made.tokens[:done], skip_special_tokens=True)
            if done < len(made.tokens):
                text = text.rstrip("\ufffd")  # half of a character waits for its other half
            yield _event({"model": name, "choices": [_choice(body, text[len(shown) :])]})
            shown = text
        rounds, accepted = sum(histogram), sum(n * count for n, count in enumerate(histogram))
        if engine == "sglang" and self._drafting and body.get("return_spec_tokens_details") and rounds:
            details = {
                "spec_verify_ct": rounds, "spec_num_correct_drafts": accepted,
                "spec_correct_drafts_histogram": histogram,
            }  # fmt: skip
            yield _event({"model": name, "choices": [], "sglext": {"spec_tokens_details": details}})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": done}
        yield _event({"model": name, "choices": [], "usage": usage})
        self._count(done, histogram)
        yield b"data: [DONE]\n\n"

    def _sizes(self, num_tokens: int) -> Iterator[int]:
        """Tokens of the prompt's pass and of each round."""
        accepts = self._drafting.accepts if self._drafting else (0,)
        left, number = num_tokens - 1, 0
        yield 1
        while left > 0:
            size = min(1 + accepts[number % len(accepts)], left)
            yield size
            left, number = left - size, number + 1

    def _count(self, tokens: int, histogram: Sequence[int]) -> None:
        with self._lock:
            self._tokens += tokens
            if self._drafting:
                self._rounds += sum(histogram)
                for place in range(len(self._accepted_at)):
                    self._accepted_at[place] += sum(histogram[place + 1 :])

    def metrics(self) -> str:
        """As vLLM's ``/metrics``."""
        with self._lock:
            lines = [f'vllm:generation_tokens_total{{engine="0"}} {self._tokens}.0']
            if self._drafting:
                prefix = "vllm:spec_decode_num_"
                lines += [
                    f'{prefix}drafts_total{{engine="0"}} {self._rounds}.0',
                    f'{prefix}accepted_tokens_total{{engine="0"}} {sum(self._accepted_at)}.0',
                ]
                lines += [
                    f'{prefix}accepted_tokens_per_pos_total{{engine="0",position="{place}"}} {count}.0'
                    for place, count in enumerate(self._accepted_at)
                ]
        return "\n".join(lines) + "\n"

    def information(self) -> dict[str, Any]:
        """As SGLang's ``/server_info``."""
        if self._drafting is None:
            return {"speculative_algorithm": None, "speculative_draft_model_path": None}
        return {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": "pretended",
            "speculative_num_steps": self._drafting.num_drafts,
            "speculative_eagle_topk": 1,
        }

    def _text(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
            return self._tokenizer


def _choice(body: dict[str, Any], text: str) -> dict[str, Any]:
    said = {"delta": {"content": text}} if "messages" in body else {"text": text}
    return {"index": 0, **said, "finish_reason": None}


def _event(value: object) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()
