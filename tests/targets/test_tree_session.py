"""Trees in decoding sessions: every node against a whole forward pass over its row and its ancestors."""

from __future__ import annotations

import random

import pytest
import torch

from eyas.base.errors import TargetError
from eyas.targets.local.model import LocalTarget
from eyas.targets.local.session import RaggedSession, RecomputeSession
from eyas.targets.local.tree import Tree
from tests.targets.test_session import bounds, feed, tokens_of, whole
from tests.tiny import VOCAB_SIZE, save_tiny_target

KINDS = ("llama", "deepseek_v3", "sliding", "nested", "recurrent")
LAYERS = (1, 3)
ROWS = [tokens_of(row, n) for row, n in enumerate((12, 1, 25))]


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalTarget:
    folder = save_tiny_target(tmp_path_factory.mktemp("model"), request.param, dtype="float64")
    return LocalTarget.load(folder, dtype="float64")


def drawn_tree(num_nodes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = random.Random(seed)
    parents = [[-1] + [draw.randrange(max(0, i - 4), i) for i in range(1, num_nodes)] for _ in ROWS]
    tokens = [[draw.randrange(VOCAB_SIZE) for _ in range(num_nodes)] for _ in ROWS]
    return torch.tensor(tokens), torch.tensor(parents)


def way(parents: torch.Tensor, row: int, node: int) -> list[int]:
    found = [node]
    while found[0] > 0:
        found.insert(0, int(parents[row, found[0]]))
    return found


@pytest.mark.parametrize("other", [False, True])
def test_nodes_and_what_follows_a_kept_path(target: LocalTarget, other: bool) -> None:
    """Three rounds of trees of 9 nodes behind rows of different lengths, a row leaves, then plain tokens."""
    session = RecomputeSession(target, len(ROWS)) if other else target.session(len(ROWS))
    rows = [list(row) for row in ROWS]
    session.prefill(rows)
    draw = random.Random(1)
    for round_ in range(3):
        tokens, parents = drawn_tree(9, round_)
        tokens, parents = tokens[: len(rows)], parents[: len(rows)]
        output = session.forward_tree(tokens, parents, aux_layers=LAYERS)
        assert output.aux is not None
        for row, before in enumerate(rows):
            for node in range(tokens.shape[1]):
                path = way(parents, row, node)
                sequence = before + [int(tokens[row, i]) for i in path]
                expected = whole(target, sequence)[-1]
                torch.testing.assert_close(output.logits[row, node], expected, **bounds(target))
                if node == 8:
                    (captured,) = target.capture([sequence], LAYERS)
                    states = output.aux[row, node].to(captured.aux.dtype)
                    torch.testing.assert_close(states, captured.aux[-1], rtol=1e-4, atol=1e-4)
        assert session.lengths.tolist() == [len(row) for row in rows]
        ends = [draw.randrange(1, 9) for _ in rows]
        ways = [way(parents, row, end) for row, end in enumerate(ends)]
        longest = max(map(len, ways))
        session.keep_path(
            torch.tensor([path + [path[-1]] * (longest - len(path)) for path in ways]),
            torch.tensor([len(path) for path in ways]),
        )
        rows = [row + [int(tokens[i, n]) for n in ways[i]] for i, row in enumerate(rows)]
        if round_ == 1:
            session.keep(torch.tensor([2, 0]))
            rows = [rows[2], rows[0]]
    new = [[5, 6, 7], [8, 9, 10]]
    found = feed(session, new)
    for row, added in enumerate(new):
        expected = whole(target, rows[row] + added)[-3:]
        torch.testing.assert_close(found[row], expected, **bounds(target))


def test_trees_that_are_none(target: LocalTarget) -> None:
    if target.facts.model_type != "llama":
        pytest.skip("one kind is enough")
    session = target.session(1)
    assert isinstance(session, RaggedSession)
    with pytest.raises(TargetError, match="has tokens"):
        session.forward_tree(torch.tensor([[1]]), torch.tensor([[-1]]))
    session.prefill([[1, 2, 3]])
    for parents in ([[0, 0]], [[-1, 1]], [[-1, -1]]):
        with pytest.raises(TargetError, match="begins at its root"):
            session.forward_tree(torch.tensor([[1, 2]]), torch.tensor(parents))
    tree = Tree.of(torch.tensor([[-1, 0, 0, 2, 2]]))
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2]]
    assert tree.path(0, 4) == [0, 2, 4]
    assert tree.leaves(0) == [1, 3, 4]
