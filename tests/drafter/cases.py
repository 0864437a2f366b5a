"""Small random drafters and samples."""

from __future__ import annotations

import numpy as np
import torch

from eyas.drafter.batch import TrainingSample
from eyas.drafter.model import EagleDrafter
from eyas.drafter.rows import last_state_rows
from eyas.drafter.shape import DrafterShape
from eyas.drafter.vocabulary import DraftVocabulary

HIDDEN, VOCAB, DRAFTS = 12, 23, 11


def make_shape(norms="eagle3", **changes):
    values = {
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "num_aux": 3,
        "intermediate_size": 20,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "draft_vocab_size": DRAFTS,
        "target_vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "norms": norms,
    }
    return DrafterShape(**{**values, **changes})


def make_drafter(norms="eagle3", dtype=torch.float64, seed=0, **changes):
    """A drafter whose every weight matters: large matrices, norms away from one."""
    shape = make_shape(norms, **changes)
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(
        shape.target_vocab_size, shape.hidden_size, generator=generator, dtype=torch.float64
    )
    drafter = EagleDrafter(shape, embedding.to(dtype)).to(dtype)
    with torch.no_grad():
        for parameter in drafter.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * values if parameter.ndim == 1 else 0.4 * values)
    return drafter


def make_vocabulary(size=DRAFTS, vocab=VOCAB, seed=0):
    ids = np.sort(np.random.default_rng(seed).permutation(vocab)[:size]).astype(np.int64)
    return DraftVocabulary(ids, vocab)


def make_head(seed=5, vocab=VOCAB, hidden=HIDDEN):
    return torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_sample(name, length, spans, seed, num_aux=3, hidden=HIDDEN, vocab=VOCAB):
    """A sample, and the naive form of it: (tokens, spans, aux, last state of every row)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (length,), generator=generator)
    aux = torch.randn(length, num_aux, hidden, generator=generator, dtype=torch.float64)
    last = torch.randn(length, hidden, generator=generator, dtype=torch.float64)
    rows = last_state_rows(spans, length)
    sample = TrainingSample(name, tokens.numpy(), tuple(spans), aux, last[torch.from_numpy(rows)], rows)
    return sample, (tokens.tolist(), spans, aux, last)


class MemorySource:
    """Samples held in a dict."""

    def __init__(self, samples):
        self.samples = {sample.id: sample for sample in samples}

    def lengths(self):
        return {name: len(sample.tokens) for name, sample in self.samples.items()}

    def supervised(self):
        return {
            name: sum(end - start for start, end in sample.spans) for name, sample in self.samples.items()
        }

    def load(self, ids):
        return [self.samples[name] for name in ids]
