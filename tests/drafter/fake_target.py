"""A small recurrent target with the session that speculative decoding asks for."""

from __future__ import annotations

from types import SimpleNamespace

import torch


class FakeTarget:
    """state[t] = tanh(mix state[t-1] + table[x[t]]); logits and aux states are linear in it."""

    def __init__(self, vocab, *, num_aux=3, width=12, dtype=torch.float64, seed=0, sharpness=1.0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*size):
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

        self.mix, self.table = 0.3 * draw(width, width), draw(vocab, width)
        self.head = sharpness * draw(vocab, width)
        self.aux = [draw(width, width) for _ in range(num_aux)]
        self.width, self.dtype = width, dtype

    def session(self, batch_size):
        return FakeSession(self, batch_size)

    def distribution(self, tokens, temperature):
        """The next token's distribution after a list of tokens, computed from the start."""
        state = torch.zeros(self.width, dtype=self.dtype)
        for token in tokens:
            state = torch.tanh(self.mix @ state + self.table[token])
        return torch.softmax((self.head @ state).double() / temperature, dim=0)


class FakeSession:
    def __init__(self, target, batch_size):
        self.target = target
        self.lengths = torch.zeros(batch_size, dtype=torch.long)
        self.states = torch.zeros(batch_size, 1, target.width, dtype=target.dtype)
        self.num_forwards = 0

    def forward(self, tokens, num_new=None, *, logits="last", aux_layers=None):
        self.num_forwards += 1
        target = self.target
        batch, count = tokens.shape
        num_new = torch.full((batch,), count) if num_new is None else num_new
        rows = torch.arange(batch)
        need = int(self.lengths.max()) + count + 1
        pad = torch.full((batch, max(0, need - self.states.shape[1]), target.width), float("nan"))
        self.states = torch.cat((self.states, pad.to(target.dtype)), dim=1)
        for i in range(count):
            before = self.states[rows, self.lengths + i]
            self.states[rows, self.lengths + i + 1] = torch.tanh(
                before @ target.mix.T + target.table[tokens[:, i]]
            )
        places = self.lengths.unsqueeze(1) + 1 + torch.arange(count)
        states = self.states[rows.unsqueeze(1), places]
        self.lengths = self.lengths + num_new
        shown = states[rows, num_new - 1] if logits == "last" else states
        aux = None
        if aux_layers is not None:
            aux = torch.stack([states @ target.aux[k].T for k in range(len(aux_layers))], dim=2)
        return SimpleNamespace(logits=shown @ target.head.T, aux=aux)

    def forward_tree(self, tokens, parents, *, aux_layers=None):
        """Each node's state from its parent's; `keep_path` writes those of one path down."""
        self.num_forwards += 1
        target, rows = self.target, torch.arange(len(tokens))
        found = []
        for node in range(tokens.shape[1]):
            stacked = torch.stack([self.states[rows, self.lengths], *found], dim=1)
            before = stacked[rows, parents[:, node] + 1]
            found.append(torch.tanh(before @ target.mix.T + target.table[tokens[:, node]]))
        self.nodes = torch.stack(found, dim=1)
        aux = None
        if aux_layers is not None:
            aux = torch.stack([self.nodes @ target.aux[k].T for k in range(len(aux_layers))], dim=2)
        return SimpleNamespace(logits=self.nodes @ target.head.T, aux=aux)

    def keep_path(self, paths, num_nodes):
        room = int(self.lengths.max()) + paths.shape[1] + 1 - self.states.shape[1]
        pad = torch.full((len(paths), max(0, room), self.target.width), float("nan"))
        self.states = torch.cat((self.states, pad.to(self.target.dtype)), dim=1)
        for row, (path, count) in enumerate(zip(paths.tolist(), num_nodes.tolist(), strict=True)):
            for step, node in enumerate(path[:count]):
                self.states[row, self.lengths[row] + 1 + step] = self.nodes[row, node]
        self.lengths = self.lengths + num_nodes

    def rollback(self, lengths):
        assert (lengths <= self.lengths).all()
        self.lengths = lengths.clone()

    def keep(self, rows):
        self.lengths, self.states = self.lengths[rows], self.states[rows]
