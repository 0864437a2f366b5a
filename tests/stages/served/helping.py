"""Fake servers in the place of real ones, and what is asked of a project afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from eyas.base.layout import Layout
from eyas.stages import served_target
from eyas.stages.stored_states import to_torch
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader
from eyas.store.samples import last_rows
from eyas.targets.compare import relative_error
from eyas.targets.fake.server import FakeServer
from eyas.targets.local.model import LocalTarget
from tests.cli.command import Finished, eyas
from tests.targets.server.fakes import Engine, FixedKeeper, fake_server, keeper_of, tiny_server_model

LAYERS = (1, 3, 5)
"""What ``auto`` gives for the six layers of the tiny target."""
PATIENT = ("--set", "client.first_byte_seconds=60", "--set", "client.dump_seconds=30")


class Servers:
    """Fake servers that take the place of those that eyas would start or find."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: LocalTarget, folder: Path, tmp: Path) -> None:
        self._model, self._folder, self._tmp = model, folder, tmp
        self._stack = ExitStack()
        self.keeper = FixedKeeper([])
        self.modes: list[str] = []

        @contextmanager
        def kept(project: Any, context: Any, mode: str) -> Iterator[FixedKeeper]:
            self.modes.append(mode)
            yield self.keeper

        monkeypatch.setattr(served_target, "open_keeper", kept)

    def start(
        self, engine: Engine, *faults: str, dumping: bool = True, replicas: int = 1, **more: Any
    ) -> list[FakeServer]:
        """New servers; earlier ones are ended."""
        self._stack.close()
        tiny = tiny_server_model(self._model, engine, LAYERS if more.pop("right", True) else (1, 2, 4))
        found = []
        for number in range(replicas):
            dumps = self._tmp / f"dumps-{number}" if dumping else None
            server = fake_server(tiny, self._folder, engine, dumps, faults if number == 0 else (), **more)
            found.append(self._stack.enter_context(server))
        self.keeper = keeper_of(*found)
        return found

    def close(self) -> None:
        self._stack.close()


def extract(root: Path, engine: str, *more: str) -> Finished:
    return eyas("extract", "--project", root, "--set", f"target.kind={engine}", *PATIENT, *more)


def counts_of(root: Path) -> dict[str, int]:
    with Ledger.open_read_only(Layout(root).ledger) as ledger:
        return {state: samples for state, (samples, _) in ledger.counts().items()}


def num_samples(root: Path) -> int:
    return int(json.loads((root / "data/samples/seal.json").read_text())["about"]["num_samples"])


def require_true_states(root: Path, folder: Path) -> int:
    """Compare every stored sample with transformers' own hidden states; returns how many there are."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layout = Layout(root)
    with Ledger.open_read_only(layout.ledger) as ledger:
        reader = StoreReader(layout.segments, ledger)
        for name in reader.ids():
            sample = reader.sample(name, check=True)
            with torch.no_grad():
                ids = torch.tensor([sample.tokens.tolist()])
                hidden = reference(input_ids=ids, output_hidden_states=True).hidden_states
            for slot, layer in enumerate(LAYERS):
                error = relative_error(to_torch(sample.aux)[:, slot], hidden[layer][0])
                assert error < 1e-4, (name, layer, error)
            rows = last_rows(sample.spans, len(sample.tokens))
            torch.testing.assert_close(to_torch(sample.last), hidden[-1][0][rows], rtol=1e-4, atol=1e-4)
        return len(reader.ids())


def samples_of(root: Path) -> set[str]:
    from eyas.store.samples import read_samples

    return {sample.id for sample in read_samples(Layout(root).samples)}
