"""What an inspection says, one finding per fault; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["fault", "warning", "note"]

FINDING_CODES: dict[str, str] = {
    # configuration
    "config-unreadable": "config.json is absent, torn or lacks a size",
    "architecture-unknown": "no engine knows the architecture name",
    "architecture-one-engine": "only one engine knows the architecture name",
    "head-tied": "the head would be replaced by the embedding",
    "draft-vocab-unsaid": "the size of the draft vocabulary is not said",
    "norm-flag-unsaid": "a norm switch is left to the engine's default",
    "norm-flag-contradicted": "a norm switch and the tensors say different things",
    "norm-before-residual": "one engine ignores norm_before_residual",
    "norms-mixed": "norm switches are those of neither EAGLE-3 nor EAGLE-3.1",
    "positions-short": "the rope table is shorter than the target's context",
    "positions-suspicious": "the number of positions looks copied from an example",
    "rope-spellings-disagree": "the old and the new spelling of rope differ",
    "rope-theta-differs": "the rope base is not the target's",
    "rope-scaling-lost": "the target scales its rope, the drafter does not",
    "rope-scaling-differs": "the rope scaling is not the target's",
    "layers-unsaid": "a number of aux layers that no engine takes by default, without ids",
    "layers-count": "the number of layer ids is not the number of aux states",
    "layers-range": "a layer id lies outside the target",
    "layers-unsorted": "layer ids are not ascending and distinct",
    "layers-engines-disagree": "the two engines would capture different layers",
    "layers-not-as-trained": "an engine would capture other layers than were trained on",
    "target-hidden-differs": "the target has another hidden size",
    "target-vocab-differs": "the target has another vocabulary",
    "end-tokens-differ": "end tokens are not the target's",
    # tensors
    "weights-unreadable": "a weight file is absent, torn or foreign",
    "tensor-missing": "a tensor is missing",
    "tensor-unknown": "a tensor means nothing to the engines",
    "tensor-shape": "a tensor has another shape than the configuration says",
    "tensor-dtype": "a tensor's type is no floating point, or another than the rest",
    "dtype-differs": "the configuration names another type than the weights have",
    "not-finite": "a tensor holds NaN or infinity",
    "all-zero": "a tensor is zero",
    "tensor-constant": "a matrix holds one value, or equal rows",
    "tensor-duplicate": "two tensors are the same",
    "norms-untouched": "every norm weight is exactly 1",
    "weights-untrained": "all weights look as they were initialised",
    "aux-chunk-unused": "the drafter hardly reads one of the aux layers",
    "head-random": "the head has nothing in common with the target's and looks initialised",
    "head-unlike-target": "the head's rows have little in common with the target's",
    "head-shifted": "the head fits the target better under a shifted mapping",
    "head-misaligned": "the head fits other rows of the target's than the mapping says",
    "embedding-foreign": "the folder's own embedding is not the target's",
    "embedding-duplicate": "the folder holds a copy of the target's embedding",
    "embedding-own": "the folder brings its own embedding",
    # mapping
    "mapping-missing": "a small draft vocabulary without d2t",
    "mapping-superfluous": "a mapping although both vocabularies are the same",
    "mapping-length": "d2t or t2d has another length than the vocabulary",
    "mapping-dtype": "d2t holds no integers",
    "mapping-absolute": "d2t holds target ids where offsets belong",
    "mapping-range": "a draft id maps outside the target's vocabulary",
    "mapping-duplicate": "two draft ids map to one target id",
    "mapping-unsorted": "target ids are not ascending",
    "mapping-placeholder": "the mapping is just the first target ids",
    "mapping-t2d-missing": "there is no t2d",
    "mapping-t2d-disagrees": "t2d marks other target ids than d2t reaches",
    "end-token-absent": "an end token can never be drafted",
    "special-token-absent": "a special token can never be drafted",
    # on prompts
    "probe-layers-shifted": "other layers than the engine would capture are accepted more",
    "probe-mapping-shifted": "a mapping moved by one is accepted more",
    "probe-shift-in-doubt": "layers or a mapping moved by one may be accepted more",
    "probe-accepts-nothing": "hardly any draft is accepted",
    # folder
    "seal-broken": "a sealed file is missing or changed",
    "state-unreadable": "a checkpoint's state cannot be read",
    "not-a-drafter": "the folder is neither an export nor a checkpoint",
}
"""Every code an inspection may give, with what it stands for."""


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing about a folder.

    ``fault``: it will not serve, or not as trained. ``warning``: it may not. ``note``: good to know.
    """

    code: str
    severity: Severity
    what: str
    evidence: str = ""
    hint: str = ""

    def __post_init__(self) -> None:
        if self.code not in FINDING_CODES:
            raise ValueError(f"no such finding: {self.code}")


@dataclass(frozen=True)
class Inspection:
    """What a folder is (``facts``: label and value) and what is wrong with it."""

    kind: Literal["eagle3 export", "eyas checkpoint", "unknown"]
    facts: list[tuple[str, str]]
    findings: list[Finding]

    @property
    def faults(self) -> list[Finding]:
        return [f for f in self.findings if f.severity == "fault"]

    @property
    def alarms(self) -> list[Finding]:
        """Faults and warnings."""
        return [f for f in self.findings if f.severity != "note"]

    def as_dict(self) -> dict[str, Any]:
        """The inspection as ``--json`` prints it."""
        return {
            "kind": self.kind,
            "facts": [{"label": label, "value": value} for label, value in self.facts],
            "findings": [asdict(f) for f in self.findings],
            "faults": len(self.faults),
        }


def some(items: Sequence[object], limit: int = 4) -> str:
    """The first few of a list, for evidence: ``a, b, c, d and 3 more``."""
    text = ", ".join(str(i) for i in items[:limit])
    return text if len(items) <= limit else f"{text} and {len(items) - limit} more"
