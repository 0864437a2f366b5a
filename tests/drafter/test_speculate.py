from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from eyas.base.errors import Stopped
from eyas.base.stop import StopFlag
from eyas.drafter import speculate
from eyas.drafter.acceptance import AcceptanceCounts
from eyas.drafter.speculate import DecodeSettings, Drafting, decode
from tests.drafter.cases import make_drafter, make_vocabulary
from tests.drafter.enumeration import SEEDS, VOCAB, require_the_targets_distribution
from tests.drafter.fake_target import FakeTarget

LAYERS = (1, 2, 3)


def drafting_for(vocab, drafts, num_drafts, dtype=torch.float64, norms="eagle3"):
    drafter = make_drafter(norms, dtype, target_vocab_size=vocab, draft_vocab_size=drafts)
    ids = torch.from_numpy(make_vocabulary(drafts, vocab).target_ids)
    return Drafting(drafter, ids, LAYERS, num_drafts)


def plain_greedy(target, prompt, limit, end_tokens):
    """Decoding from the definition: the whole prefix again for every token."""
    answer = []
    while len(answer) < limit:
        answer.append(int(target.distribution([*prompt, *answer], 1.0).argmax()))
        if answer[-1] in end_tokens:
            return answer, "stop"
    return answer, "length"


PROMPTS = [[1, 2, 3], [4], [0, 0, 1, 2, 3, 4, 0], [2, 2], [3, 1], [1, 4, 4, 2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_drafts", [0, 1, 2, 5])
@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
def test_greedy_equals_plain_decoding(dtype, num_drafts, norms):
    accepted = 0
    for seed in range(4):
        target = FakeTarget(5, dtype=dtype, seed=seed)
        limits = [1, 2, 3, 7, 19, 30]
        ends = frozenset({4}) if seed % 2 else frozenset()
        drafting = drafting_for(5, 4, num_drafts, dtype, norms)
        answers = decode(target.session(6), PROMPTS, DecodeSettings(limits, ends), drafting)
        for prompt, limit, answer in zip(PROMPTS, limits, answers, strict=True):
            expected, reason = plain_greedy(target, prompt, limit, ends)
            assert answer.tokens == expected
            assert answer.finish_reason == reason
            counts = answer.counts
            if len(counts.drafted) == num_drafts:
                # every token but the first came from a round: its accepted drafts and, unless a draft ended
                # the answer, one of the target's own
                assert len(answer.tokens) - 1 in (
                    counts.rounds + sum(counts.accepted),
                    counts.rounds + sum(counts.accepted) - 1,
                )
            accepted += sum(counts.accepted)
    assert (accepted > 0) == (num_drafts > 0)


def test_counts_do_not_depend_on_the_batch():
    target = FakeTarget(5, seed=2)
    limits = [1, 2, 3, 7, 19, 30]
    drafting = drafting_for(5, 4, 3)
    together = decode(target.session(6), PROMPTS, DecodeSettings(limits, frozenset({4})), drafting)
    for prompt, limit, answer in zip(PROMPTS, limits, together, strict=True):
        alone = decode(target.session(1), [prompt], DecodeSettings(limit, frozenset({4})), drafting)[0]
        assert alone == answer


class ScriptedCache:
    """Drafts a given continuation of one answer, whatever the weights say."""

    script: ClassVar[list[int]] = []

    def __init__(self, drafter, batch_size):
        self.known = 0

    def _logits(self):
        ids = self.script[self.place] if self.place < len(self.script) else 0
        return torch.nn.functional.one_hot(torch.tensor([ids]), 5).double()

    def extend(self, aux, tokens, num_new):
        self.known += 1 if self.known == 0 else int(num_new[0])
        self.place = self.known
        return self._logits()

    def draft(self, tokens):
        self.place += 1
        return self._logits()

    def keep(self, rows):
        pass


def scripted(monkeypatch, script, limit, ends=frozenset(), num_drafts=3, seed=4):
    monkeypatch.setattr(ScriptedCache, "script", script)
    monkeypatch.setattr(speculate, "DraftCache", ScriptedCache)
    session = FakeTarget(5, seed=seed).session(1)
    drafting = Drafting(make_drafter(), torch.arange(5), LAYERS, num_drafts)
    answer = decode(session, [[1, 2]], DecodeSettings(limit, ends), drafting)[0]
    assert session.num_forwards == answer.counts.rounds + 1
    return answer


def greedy_answer(limit, seed=4):
    return plain_greedy(FakeTarget(5, seed=seed), [1, 2], limit, ())[0]


def test_a_perfect_drafter(monkeypatch):
    answer = scripted(monkeypatch, greedy_answer(40), 13)
    assert answer.tokens == greedy_answer(13)
    # the prompt's pass gives token 1, three rounds of 3 + 1 give the other twelve
    assert answer.counts.rounds == 3
    assert answer.counts.accepted == answer.counts.drafted == answer.counts.reached == [3, 3, 3]
    assert answer.counts.acceptance_length == 4.0


def test_the_length_limit_leaves_drafts_out(monkeypatch):
    answer = scripted(monkeypatch, greedy_answer(40), 7)
    # 1 + 4, then two tokens are left: one draft and the round's own token
    assert answer.counts.rounds == 2
    assert answer.counts.drafted == answer.counts.accepted == [2, 1, 1]


def test_a_wrong_draft_ends_its_round(monkeypatch):
    wrong = greedy_answer(40)
    wrong[2] = (wrong[2] + 1) % 5
    answer = scripted(monkeypatch, wrong, 5)
    # round 1: place 1 accepted, place 2 refused and replaced; round 2 has places 3 and 4 left
    assert answer.tokens == greedy_answer(5)
    assert answer.counts == AcceptanceCounts(
        rounds=2, drafted=[2, 1, 1], reached=[2, 1, 0], accepted=[2, 0, 0]
    )
    assert answer.counts.acceptance_length == 2.0
    assert answer.counts.conditional_rates == [1.0, 0.0, 0.0]
    assert answer.counts.unconditional_rates == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("seed", "place", "in_last_round"), [(39, 5, 1), (7, 6, 2)])
def test_an_accepted_end_token_cuts_the_round(monkeypatch, seed, place, in_last_round):
    """The end token is the first or second draft of round two; drafts behind it count for nothing."""
    text = greedy_answer(40, seed)
    assert text[place] not in text[:place]
    answer = scripted(monkeypatch, text, 40, frozenset({text[place]}), seed=seed)
    assert answer.tokens == text[: place + 1]
    assert answer.finish_reason == "stop"
    assert answer.counts.rounds == 2
    expected = [1 + (position < in_last_round) for position in range(3)]
    assert answer.counts.accepted == answer.counts.reached == expected
    assert answer.counts.drafted == [2, 2, 2]


def test_sampling_gives_what_plain_sampling_gives():
    target = FakeTarget(6, seed=3)
    settings = DecodeSettings(25, frozenset({5}), temperature=1.3, seeds=[7, 8, 9, 10, 11, 12])
    plain = decode(target.session(6), PROMPTS, settings)
    fast = decode(target.session(6), PROMPTS, settings, drafting_for(6, 5, 3))
    assert [a.tokens for a in plain] == [a.tokens for a in fast]
    assert sum(sum(a.counts.accepted) for a in fast) > 0
    alone = decode(target.session(1), PROMPTS[2:3], DecodeSettings(25, frozenset({5}), 1.3, [9]))
    assert alone[0].tokens == plain[2].tokens
    assert len({tuple(a.tokens) for a in plain}) == 6


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_sampling_keeps_the_targets_distribution(num_drafts):
    drafting = drafting_for(VOCAB, 3, num_drafts) if num_drafts else None
    accepted = require_the_targets_distribution(drafting)
    assert not num_drafts or accepted > SEEDS / 10


def test_stop_and_bad_calls():
    target = FakeTarget(5)
    flag = StopFlag()
    flag.request(15)
    with pytest.raises(Stopped):
        decode(target.session(1), [[1]], DecodeSettings(9), stop=flag)
    with pytest.raises(ValueError, match="seed"):
        decode(target.session(1), [[1]], DecodeSettings(9, temperature=1.0))
    with pytest.raises(ValueError, match="empty"):
        decode(target.session(1), [[]], DecodeSettings(9))
    assert decode(target.session(0), [], DecodeSettings(9)) == []


def test_totals_weigh_rounds():
    a = AcceptanceCounts(3, [3, 3], [3, 2], [2, 1])
    b = AcceptanceCounts(1, [1, 1], [1, 0], [0, 0])
    total = AcceptanceCounts.total([a, b], 2)
    assert total == AcceptanceCounts(4, [4, 4], [4, 2], [2, 1])
    assert total.acceptance_length == 1.75
    assert total.conditional_rates == [0.5, 0.5]
    assert total.unconditional_rates == [0.5, 0.25]
    assert AcceptanceCounts.empty(2).acceptance_length == 1.0
