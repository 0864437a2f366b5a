"""The arithmetic that one training step needs, counted from the definition."""

from __future__ import annotations

from benchmarks.training.case import Case


def needed(case: Case) -> dict[str, float]:
    """Floating-point operations of each part of a step: two for each multiplication with its addition.

    A product is done once forward, once for the gradient of its input and once for that of its weight, unless
    said otherwise. Nothing that is only convenient is counted: no product made again for the gradient, no
    unseen score, no row without supervision beyond its key and value, nothing element by element.
    """
    rows = [len(case.rows(step, shifted=False)) for step in range(case.steps)]
    first, count = case.rows(0, shifted=False), sum(rows)
    before = first.stop  # rows whose key and value of step 0 are looked at
    hidden, attention = case.hidden, case.heads * case.head_dim
    key_value = 2 * case.kv_heads * case.head_dim
    # scores and mixed values: every query of step j sees the rows up to its own, and j keys of its own
    pairs = sum(row + 1 + step for step in range(case.steps) for row in case.rows(step, shifted=False))
    # the token's half of a projection is the same for row t at step j as for row t + j at step 0
    return {
        "fc (aux states need no gradient)": 2 * 2 * before * case.num_aux * hidden * hidden,
        "query, key, value of the token, once": 3 * 2 * hidden * (before * key_value + rows[0] * attention),
        "query, key, value of the feature": 3
        * 2
        * hidden
        * ((before + count - rows[0]) * key_value + count * attention),
        "attention": 3 * 2 * 2 * pairs * attention,
        "output projection": 3 * 2 * count * attention * hidden,
        "MLP": 3 * 2 * count * 3 * hidden * case.intermediate,
        "head": 3 * 2 * count * hidden * case.drafts,
        "teacher, forward only, once": 2 * rows[0] * hidden * case.drafts,
    }
