"""One tiny target for all tests of the client, and its states by transformers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from eyas.targets.local.model import LocalTarget
from eyas.targets.server.capturing import Canary, CaptureRules
from eyas.targets.server.heads import Heads
from eyas.targets.server.reference import make_reference
from tests.tiny import save_tiny_target

LAYERS = (1, 3, 5)
NUM_SAMPLES = 6


@dataclass(frozen=True)
class Tiny:
    """A target folder, the model in this process, and what the client needs to know of it."""

    folder: Path
    target: LocalTarget
    rules: CaptureRules
    canary: Canary
    heads: Heads
    prompts: dict[str, list[int]]
    states_of: Callable[[Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = save_tiny_target(tmp_path_factory.mktemp("served") / "model")
    target = LocalTarget.load(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def states_of(tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Aux [T, 3, H] and last [T, H] by transformers' own output, without any code of eyas."""
        with torch.no_grad():
            output = model(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True)
        hidden = output.hidden_states
        return torch.stack([hidden[k][0] for k in LAYERS], dim=1), hidden[-1][0]

    generator = torch.Generator().manual_seed(7)
    prompts = {
        f"sample{i}": torch.randint(3, 330, (24 + 7 * i,), generator=generator).tolist()
        for i in range(NUM_SAMPLES)
    }
    tokens = tuple(torch.randint(3, 330, (40,), generator=generator).tolist())
    return Tiny(
        folder=folder,
        target=target,
        rules=CaptureRules(target.facts, LAYERS, torch.float32, torch.float32),
        canary=Canary(tokens, make_reference(folder, tokens, trust_remote_code=False)),
        heads=Heads.load(folder),
        prompts=prompts,
        states_of=states_of,
    )
