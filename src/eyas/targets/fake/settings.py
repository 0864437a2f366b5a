"""How a fake server behaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas.targets.fake.as_json import Returns
from eyas.targets.fake.drafts import FakeDrafting
from eyas.targets.fake.faults import Fault


@dataclass(frozen=True)
class FakeSettings:
    """How a fake server behaves.

    Args:
        engine: whose side of the protocol it speaks.
        mode: ``capture`` dumps states of requests that name one; ``generate`` answers.
        model_name: what it says it serves; empty: the name of the model's folder.
        dump_folder: where dumps go.
        returns: states that SGLang's replies hold as JSON, in place of dumps.
        faults: what goes wrong.
        api_key: that requests have to bring; empty: none.
        certificate, key: PEM files for https.
        max_tokens: longest prompt and answer together.
        process_dies: ``dies`` ends the process, not only the listening.
        drafting: a drafter that it pretends to have; None: none.
        round_seconds: what a forward pass pretends to take, in answers that are streamed.
    """

    engine: Literal["vllm", "sglang"]
    mode: Literal["capture", "generate"]
    model_folder: Path
    dump_folder: Path | None = None
    returns: Returns = ""
    faults: tuple[Fault, ...] = ()
    model_name: str = ""
    api_key: str = ""
    certificate: Path | None = None
    key: Path | None = None
    max_tokens: int = 2048
    process_dies: bool = False
    drafting: FakeDrafting | None = None
    round_seconds: float = 0.0

    @property
    def served_name(self) -> str:
        return self.model_name or self.model_folder.name
