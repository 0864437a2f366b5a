"""Where everything in a project folder lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CONFIG_NAME = "eyas.toml"
FORMAT = 1
"""Format of the project folder; a higher number in a project means a newer eyas wrote it."""


@dataclass(frozen=True)
class Layout:
    """The paths of one project; nothing is created by asking for them."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / CONFIG_NAME

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def ledger(self) -> Path:
        return self.state / "ledger.db"

    @property
    def servers(self) -> Path:
        """Servers that eyas started and has not stopped."""
        return self.state / "servers.json"

    @property
    def engine_plugin(self) -> Path:
        """What engines load, made for them; removed and made again freely."""
        return self.state / "engine-plugin"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def prompts(self) -> Path:
        """Sealed: what regenerate answers (only when regeneration is on)."""
        return self.data / "prompts"

    @property
    def answers(self) -> Path:
        """Immutable part files of answers, one per finished group."""
        return self.data / "answers"

    @property
    def samples(self) -> Path:
        """Sealed: the samples that are captured and trained on."""
        return self.data / "samples"

    @property
    def stats(self) -> Path:
        return self.data / "stats.json"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def store_recipe(self) -> Path:
        return self.store / "store.json"

    @property
    def segments(self) -> Path:
        return self.store / "segments"

    @property
    def drafter(self) -> Path:
        return self.root / "drafter"

    @property
    def vocabulary(self) -> Path:
        """Sealed: the draft vocabulary mapping."""
        return self.drafter / "vocabulary"

    @property
    def checkpoints(self) -> Path:
        """Holds sealed folders ``step-00000123``."""
        return self.drafter / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Training metrics, one JSON object a line."""
        return self.drafter / "metrics.jsonl"

    @property
    def exports(self) -> Path:
        return self.root / "exports"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    @property
    def evaluation(self) -> Path:
        return self.reports / "evaluation.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def written(self) -> tuple[Path, ...]:
        """Folders in which a killed run may have left something unfinished."""
        return (
            self.root, self.state, self.data, self.answers, self.store, self.drafter, self.checkpoints,
            self.exports, self.reports, self.logs, self.set_aside,
        )  # fmt: skip

    @property
    def set_aside(self) -> Path:
        return self.root / "set-aside"
