"""What needs no server: prompts, shares, the best number of drafts, comparison of texts."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.base.errors import DataError, UsageError
from eyas.cli.verbs.bench import parse_concurrencies
from eyas.targets.bench.advice import advise
from eyas.targets.bench.level import Spread
from eyas.targets.bench.prompts import BenchPrompt, read_prompts, share_out
from eyas.targets.bench.run import compare_texts
from eyas.targets.bench.stream import speculation_of
from eyas.targets.serving.speculation import Speculation

MT_BENCH = {"id": "a", "domain": "mt", "turns": ["Name a river.", "And its mouth?"]}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "an answer that was given"},
        {"role": "user", "content": "And now?"},
    ]
}
TOKENS = {"prompt_ids": [5, 6, 7], "output_ids": [8, 2]}


def lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_every_form_becomes_turns_and_none_comes_twice(tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", MT_BENCH, CHAT, MT_BENCH)
    two = tmp_path / "two.jsonl.gz"
    two.write_bytes(gzip.compress((json.dumps(TOKENS) + "\n" + json.dumps(CHAT) + "\n").encode()))
    found = read_prompts([one, two])
    assert len(found) == 3
    by_turns = {(prompt.num_turns, bool(prompt.tokens)): prompt for prompt in found}
    assert set(by_turns) == {(2, False), (1, True)}  # both conversations ask twice
    (chat,) = [prompt for prompt in found if prompt.turns and prompt.turns[0][0]["role"] == "system"]
    assert [m["role"] for m in chat.messages([])] == ["system", "user"]
    second = chat.messages(["the server's own"])
    assert [(m["role"], m["content"]) for m in second[2:]] == [
        ("assistant", "the server's own"),
        ("user", "And now?"),
    ]
    assert by_turns[1, True].tokens == (5, 6, 7)
    assert {p.id for p in read_prompts([two, one])} == {p.id for p in found}
    assert read_prompts([one, two], limit=2) == found[:2]


def test_published_sets_are_read_as_they_are(tmp_path: Path) -> None:
    """The keys of MT-bench, GSM8K and HumanEval; their solutions are no turn."""
    found = read_prompts(
        [
            lines(
                tmp_path / "mt_bench.jsonl",
                {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["x"]},
            ),
            lines(tmp_path / "gsm8k.jsonl", {"question": "How many?", "answer": "2 + 2 = 4 #### 4"}),
            lines(
                tmp_path / "humaneval.jsonl",
                {
                    "task_id": "HumanEval/0",
                    "prompt": "def f():\n",
                    "entry_point": "f",
                    "canonical_solution": "    return 1\n",
                    "test": "assert f() == 1",
                },
            ),
        ]
    )
    asked = {prompt.domain: [turn[0]["content"] for turn in prompt.turns] for prompt in found}
    assert asked == {
        "mt_bench": ["Write.", "Again."],
        "gsm8k": ["How many?"],
        "humaneval": ["def f():\n"],
    }


def test_domains_take_turns(tmp_path: Path) -> None:
    records = [{"prompt": f"question {i}", "domain": "ab"[i >= 30]} for i in range(40)]
    found = read_prompts([lines(tmp_path / "p.jsonl", *records)])
    for start in range(0, 40, 8):  # any stretch has three of a for each b
        assert Counter(p.domain for p in found[start : start + 8]) == {"a": 6, "b": 2}
    other = read_prompts([lines(tmp_path / "p.jsonl", *records)], seed=1)
    assert [p.id for p in other] != [p.id for p in found]


def test_unusable_records_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a prompt cannot be used") as caught:
        read_prompts([lines(tmp_path / "p.jsonl", MT_BENCH, {"messages": []})])
    assert caught.value.where == f"{tmp_path / 'p.jsonl'}:2"
    with pytest.raises(DataError):
        read_prompts([tmp_path / "absent.jsonl"])


def test_no_prompt_is_in_two_levels() -> None:
    prompts = [BenchPrompt(str(i), "") for i in range(50)]
    shares = share_out(prompts, [1, 4, 16])
    names = [prompt.id for share in shares for prompt in share]
    assert len(names) == len(set(names))
    assert [len(share) >= level for share, level in zip(shares, [1, 4, 16], strict=True)] == [True] * 3
    assert len(names) == 50
    assert [len(share) for share in share_out(prompts[:21], [1, 4, 16])] == [1, 4, 16]
    with pytest.raises(UsageError, match="too few"):
        share_out(prompts[:20], [1, 4, 16])


def test_best_number_of_drafts_against_a_table_by_hand() -> None:
    """A forward of 10 ms, drafts of 2 ms each; a chain of 4 accepts 0.8, 0.5, 0.2 and 0.05."""
    rates = [0.8, 0.5, 0.2, 0.05]
    found = advise(0.010, (0.010 + 4 * 0.002) / 2.55, rates)
    assert found.draft_seconds == pytest.approx(0.002)
    by_hand = {0: 1 / 10, 1: 1.8 / 12, 2: 2.3 / 14, 3: 2.5 / 16, 4: 2.55 / 18}  # tokens a millisecond
    measured = {c.num_drafts: c.tokens_per_second / 1000 for c in found.choices if not c.guessed}
    assert measured == pytest.approx(by_hand)
    assert found.best.num_drafts == 2
    assert found.longer is None
    guess = found.choices[5]
    assert (guess.num_drafts, guess.guessed) == (5, True)
    assert guess.acceptance_length == pytest.approx(2.55 + 0.05 * 0.25)  # the last fall was to a quarter


def test_a_drafter_that_costs_more_than_it_brings() -> None:
    assert advise(0.010, 0.030 / 1.3, [0.3]).best.num_drafts == 0


def test_a_longer_chain_is_suggested_only_as_a_guess() -> None:
    found = advise(0.010, 0.011 / 1.9, [0.9])
    assert found.best.num_drafts == 1
    assert found.longer is not None
    assert found.longer.num_drafts == 2


def test_percentiles() -> None:
    values = [0.3, 0.1, 0.2, 1.0]
    found = Spread.of(values)
    assert found is not None
    assert (found.mean, found.p50) == pytest.approx((0.4, 0.25))
    assert found.p95 == pytest.approx(0.3 + 0.7 * 0.85)  # rank 2.85 of 0..3, between 0.3 and 1.0
    assert found.p95 == pytest.approx(float(np.quantile(values, 0.95)))
    assert Spread.of([]) is None


def test_texts_after_a_difference_are_not_compared() -> None:
    plain = {"a": ["one", "two", "three"], "b": ["same"], "c": []}
    drafted = {"a": ["one", "twx", "other"], "b": ["same"], "c": ["extra"]}
    found = compare_texts(plain, drafted)
    assert (found.compared, found.equal, found.not_compared) == (3, 2, 1)
    assert found.differences == ({"prompt": "a", "turn": 1, "first_character": 2},)
    assert compare_texts({"a": ["long"]}, {"a": ["lo"]}).differences[0]["first_character"] == 2


def test_sglangs_histogram() -> None:
    """2 rounds without a draft, 3 with one, 1 with three."""
    details = {
        "spec_verify_ct": 6,
        "spec_num_correct_drafts": 6,
        "spec_correct_drafts_histogram": [2, 3, 0, 1],
    }
    assert speculation_of(details) == Speculation(6, 6, (4, 1, 1))
    assert speculation_of({"spec_verify_ct": 0}) is None
    both = Speculation(6, 6, (4, 1, 1)) + Speculation(1, 0, ())
    assert both == Speculation(7, 6, (4, 1, 1))


def test_concurrencies() -> None:
    assert parse_concurrencies("16,1,4,4") == [1, 4, 16]
    for text in ("", "0,1", "a", "1;2"):
        with pytest.raises(UsageError):
            parse_concurrencies(text)
