"""Draft trees: grown as EAGLE-2 says, decoded without loss."""

from __future__ import annotations

import math

import pytest
import torch

from eyas.drafter.cache import DraftCache
from eyas.drafter.speculate import DecodeSettings, Drafting, decode
from eyas.drafter.tree import DraftTree, TreeShape, follow, grow
from tests.drafter.cases import make_drafter, make_sample, make_vocabulary
from tests.drafter.enumeration import SEEDS, VOCAB, require_the_targets_distribution
from tests.drafter.fake_target import FakeTarget
from tests.drafter.test_speculate import LAYERS, PROMPTS, plain_greedy

SHAPES = [TreeShape(1, 1, 1), TreeShape(3, 1, 3), TreeShape(2, 3, 5), TreeShape(4, 2, 6), TreeShape(5, 3, 40)]


def drafting_for(vocab, drafts, shape, dtype=torch.float64, norms="eagle3"):
    drafter = make_drafter(norms, dtype, target_vocab_size=vocab, draft_vocab_size=drafts)
    ids = torch.from_numpy(make_vocabulary(drafts, vocab).target_ids)
    depth = shape if isinstance(shape, int) else shape.depth
    return Drafting(drafter, ids, LAYERS, depth, None if isinstance(shape, int) else shape)


def extended(drafter, tokens, aux):
    cache = DraftCache(drafter, 1)
    rows = len(tokens) - 1
    return cache, cache.extend(aux[None, :rows], torch.tensor([tokens[1:]]), torch.tensor([rows]))


def log_probabilities(drafter, tokens, aux, path, ids):
    """Of every draft id behind a path, by a chain that is drafted from the beginning."""
    cache, logits = extended(drafter, tokens, aux)
    for draft in path:
        logits = cache.draft(ids[torch.tensor([draft])])
    values = logits[0].tolist()
    total = math.log(sum(math.exp(v) for v in values))
    return [v - total for v in values]


def naive_tree(drafter, tokens, aux, ids, shape):
    """{path of draft ids: score} of the best drafts, with lists and whole chains only."""
    came_up: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(shape.depth):
        children = {}
        for path, score in frontier.items():
            values = log_probabilities(drafter, tokens, aux, path, ids)
            best = sorted(range(len(values)), key=lambda i: -values[i])[: shape.top_k]
            children.update({(*path, i): score + values[i] for i in best})
        came_up.update(children)
        frontier = dict(sorted(children.items(), key=lambda item: -item[1])[: shape.top_k])
    return dict(sorted(came_up.items(), key=lambda item: -item[1])[: shape.total_tokens])


def paths_of(tree, row, draft_of):
    """Paths of draft ids of all nodes but the root."""
    found = {0: ()}
    for node in range(1, tree.tokens.shape[1]):
        parent = int(tree.parents[row, node])
        assert parent < node
        found[node] = (*found[parent], draft_of[int(tree.tokens[row, node])])
        assert int(tree.depths[row, node]) == len(found[node])
    return [found[node] for node in range(1, len(found))]


@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_holds_the_likeliest_drafts(norms, shape):
    """Two rows of different length together, each against its own naive tree."""
    drafter = make_drafter(norms)
    ids = torch.from_numpy(make_vocabulary().target_ids)
    draft_of = {int(token): draft for draft, token in enumerate(ids)}
    made = [make_sample(f"s{i}", 4 + 3 * i, [(1, 4)], i)[1] for i in range(2)]
    sizes = [len(tokens) - 1 for tokens, *_ in made]
    aux = torch.zeros(2, max(sizes), 3, 12, dtype=torch.float64)
    following = torch.zeros(2, max(sizes), dtype=torch.long)
    for row, (tokens, _, states, _) in enumerate(made):
        aux[row, : sizes[row]] = states[: sizes[row]]
        following[row, : sizes[row]] = torch.tensor(tokens[1:])
    cache = DraftCache(drafter, 2)
    logits = cache.extend(aux, following, torch.tensor(sizes))
    pending = torch.tensor([tokens[-1] for tokens, *_ in made])
    tree = grow(cache, logits, pending, ids, shape)
    assert tree.tokens[:, 0].tolist() == pending.tolist()
    assert tree.parents[:, 0].tolist() == [-1, -1]
    for row, (tokens, _, states, _) in enumerate(made):
        found = paths_of(tree, row, draft_of)
        assert len(found) == len(set(found))
        assert set(found) == set(naive_tree(drafter, tokens, states, ids, shape))


def test_drafts_leave_nothing_behind():
    """After a tree, the next extension gives what it gives without one."""
    drafter = make_drafter()
    ids = torch.from_numpy(make_vocabulary().target_ids)
    tokens, _, aux, _ = make_sample("s", 9, [(1, 9)], 1)[1]
    plain, _ = extended(drafter, tokens[:5], aux)
    cache, logits = extended(drafter, tokens[:5], aux)
    grow(cache, logits, torch.tensor([tokens[4]]), ids, TreeShape(4, 3, 20))
    more = (aux[None, 4:7], torch.tensor([tokens[5:8]]), torch.tensor([3]))
    torch.testing.assert_close(cache.extend(*more), plain.extend(*more), rtol=0, atol=1e-12)
    token = torch.tensor([tokens[8]])
    torch.testing.assert_close(cache.draft(token), plain.draft(token), rtol=0, atol=1e-12)


def test_the_walk_through_a_tree():
    """The root's children are 5 and 6; 6 has a child 5, and that a child 7."""
    tree = DraftTree(
        tokens=torch.tensor([[1, 5, 6, 5, 7]] * 4),
        parents=torch.tensor([[-1, 0, 0, 2, 3]] * 4),
        depths=torch.tensor([[0, 1, 1, 2, 3]] * 4),
    )
    nobody = 9
    choices = torch.tensor(
        [
            [6, nobody, 5, 7, 4],  # all the way down
            [6, nobody, 7, 7, 4],  # the child of 6 is 5, not 7
            [5, 5, 5, 7, 4],  # the first child has no children
            [7, 5, 5, 7, 4],  # not even the first
        ]
    )
    paths, agreed = follow(tree, choices)
    assert agreed.tolist() == [3, 1, 1, 0]
    assert [path[: count + 1] for path, count in zip(paths.tolist(), agreed.tolist(), strict=True)] == [
        [0, 2, 3, 4],
        [0, 2],
        [0, 1],
        [0],
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_equals_plain_decoding(dtype, norms, shape):
    accepted = 0
    for seed in range(3):
        target = FakeTarget(5, dtype=dtype, seed=seed)
        limits = [1, 2, 3, 7, 19, 30]
        ends = frozenset({4}) if seed % 2 else frozenset()
        drafting = drafting_for(5, 4, shape, dtype, norms)
        session = target.session(6)
        answers = decode(session, PROMPTS, DecodeSettings(limits, ends), drafting)
        for prompt, limit, answer in zip(PROMPTS, limits, answers, strict=True):
            assert (answer.tokens, answer.finish_reason) == plain_greedy(target, prompt, limit, ends)
            counts = answer.counts
            taken = counts.rounds + sum(counts.accepted)
            assert len(answer.tokens) - 1 in (taken, taken - 1)  # one less where a draft ended the answer
            accepted += sum(counts.accepted)
    assert accepted > 0


def test_a_tree_of_width_one_is_a_chain():
    target = FakeTarget(5, seed=2)
    settings = DecodeSettings([1, 2, 3, 7, 19, 30], frozenset({4}))
    chain = decode(target.session(6), PROMPTS, settings, drafting_for(5, 4, 3))
    tree = decode(target.session(6), PROMPTS, settings, drafting_for(5, 4, TreeShape(3, 1, 3)))
    assert tree == chain


def test_counts_do_not_depend_on_the_batch():
    target, limits = FakeTarget(5, seed=2), [1, 2, 3, 7, 19, 30]
    drafting = drafting_for(5, 4, TreeShape(3, 2, 7))
    together = decode(target.session(6), PROMPTS, DecodeSettings(limits, frozenset({4})), drafting)
    for prompt, limit, answer in zip(PROMPTS, limits, together, strict=True):
        alone = decode(target.session(1), [prompt], DecodeSettings(limit, frozenset({4})), drafting)[0]
        assert alone == answer


def test_a_tree_accepts_more_than_a_chain_of_its_depth():
    sums = {"chain": [0, 0], "tree": [0, 0]}
    for seed in range(6):
        target = FakeTarget(5, seed=seed)
        for name, shape in (("chain", 3), ("tree", TreeShape(3, 3, 12))):
            answers = decode(target.session(6), PROMPTS, DecodeSettings(30), drafting_for(5, 4, shape))
            for answer in answers:
                sums[name][0] += answer.counts.rounds
                sums[name][1] += sum(answer.counts.accepted)
    lengths = {name: 1 + accepted / rounds for name, (rounds, accepted) in sums.items()}
    assert lengths["tree"] > lengths["chain"] + 0.3


def test_sampling_gives_what_plain_sampling_gives():
    target = FakeTarget(6, seed=3)
    settings = DecodeSettings(25, frozenset({5}), temperature=1.3, seeds=[7, 8, 9, 10, 11, 12])
    plain = decode(target.session(6), PROMPTS, settings)
    fast = decode(target.session(6), PROMPTS, settings, drafting_for(6, 5, TreeShape(4, 3, 11)))
    assert [a.tokens for a in plain] == [a.tokens for a in fast]
    assert sum(sum(a.counts.accepted) for a in fast) > 0


def test_sampling_keeps_the_targets_distribution():
    accepted = require_the_targets_distribution(drafting_for(VOCAB, 3, TreeShape(3, 2, 6)))
    assert accepted > SEEDS / 4
