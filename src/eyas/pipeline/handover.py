"""Phases of a run: extraction hands over to training by itself, each step with its evidence.

Nothing here reads tensors: what extraction committed is known to the ledger, so no scan stands between the
last capture and the first training step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from eyas.base.errors import EyasError
from eyas.base.seal import is_sealed, seal_faults
from eyas.base.units import format_bytes, format_count, format_numbers
from eyas.hosts.gpus import GpuReader, NvmlGpus
from eyas.pipeline.attempt import Attempt
from eyas.stages.project import Project
from eyas.store.ledger import Ledger
from eyas.store.ledger_history import Todo
from eyas.store.todos import TodoBook, read_phases, whoami
from eyas.targets.serving.overview import stop_servers
from eyas.targets.serving.patches import Patches
from eyas.targets.serving.records import ServerBook

PHASE = "extraction"
TRAINING = "training"
_UNTRIED = ("pending", "in_progress")
_TRAINING_STAGES = {
    "train": "Train the drafter",
    "evaluate": "Measure it on held-out prompts",
    "export": "Write what engines load",
}


@dataclass
class Handover:
    """The todos of extraction and training; a phase opens when its work starts and closes when it is over.

    Args:
        gpus: who is asked for GPU memory.
    """

    project: Project
    ledger: Ledger
    attempt: Attempt
    verb: str
    gpus: GpuReader = field(default_factory=NvmlGpus)
    more_to_capture: bool = False
    """Whether captures are left although training works already, as it does in waves."""

    def __post_init__(self) -> None:
        self._book = TodoBook(self.attempt, whoami(self.verb), self.attempt.number, self.ledger)
        self._phase = self._training = ""

    def began(self, stage: str) -> None:
        """A stage starts: its phase opens or goes on, and the one before it closes.

        The list is kept for people: one that cannot be written (disk full) does not end the work.
        """
        with suppress(EyasError):
            self._began(stage)

    def ended(self, stage: str, numbers: Mapping[str, object]) -> None:
        """A stage ended well."""
        with suppress(EyasError):
            self._ended(stage, numbers)

    def found_done(self, stage: str) -> None:
        """A stage was done before this run came to it: a drafter that is trained waits for no extraction."""
        if stage == "train":
            with suppress(EyasError):
                self._launched("the drafter was trained before", "the drafter was trained before")

    def _began(self, stage: str) -> None:
        if stage == "extract":
            self.open()
        elif stage == "train" and not self.more_to_capture:
            self.training_began()
        if stage in _TRAINING_STAGES:
            self._training = self._open_training(stage)
            self._stage_is(stage, "in_progress", f"attempt {self.attempt.number}")

    def _ended(self, stage: str, numbers: Mapping[str, object]) -> None:
        if stage == "extract" and not self.more_to_capture:
            self.captured()
        elif self._training and stage in _TRAINING_STAGES:
            self._stage_is(stage, "completed", format_numbers(numbers))
            if stage == "export":
                self._book.close_phase(self._training, "exported")

    def _open_training(self, first: str) -> str:
        id_ = self._book.open_phase(TRAINING)
        known = {todo.id for phase in read_phases(self.ledger) for todo in phase.todos}
        names = list(_TRAINING_STAGES)
        for name in names[names.index(first) :]:
            if f"{id_}/{name}" not in known:
                self._put(id_, name, "pending", "")
        return id_

    def _stage_is(self, stage: str, status: str, evidence: str) -> None:
        self._put(self._training, stage, status, evidence)

    def _put(self, phase: str, stage: str, status: str, evidence: str) -> None:
        names = list(_TRAINING_STAGES)
        place = names.index(stage)
        before = (f"{phase}/{names[place - 1]}",) if place else ()
        self._book.put(
            Todo(f"{phase}/{stage}", _TRAINING_STAGES[stage], "high", status, before, evidence, "")
        )

    def open(self) -> None:
        """Extraction begins, or goes on after a stop."""
        self._phase = self._book.open_phase(PHASE)
        known = {todo.id for phase in read_phases(self.ledger) for todo in phase.todos}
        before: tuple[str, ...] = ()
        for key, content in _CONTENTS.items():
            id_ = f"{self._phase}/{key}"
            if id_ not in known:
                self._book.put(Todo(id_, content, "high", "pending", before, "", ""))
            before = (id_,)
        self._change("capture", "in_progress", "extraction runs")

    def captured(self) -> None:
        """The last capture is committed: stop what only capturing needed, and prove it gone.

        A step that fails is blocked with its reason and does not keep training from beginning.
        """
        if not self._phase:
            return
        counts = self.ledger.counts()
        said = ", ".join(
            f"{format_count(count.samples)} {state.replace('_', ' ')}"
            for state, count in counts.items()
            if count.samples
        )
        self._change("capture", "completed", f"ledger: {said}")
        for key, step in (
            ("servers", self._stop_servers),
            ("gpus", self._prove_gpus),
            ("patches", self._restore_patches),
            ("mapping", self._check_mapping),
        ):
            self._do(key, step)

    def training_began(self) -> None:
        """Training is launched: the phase closes, also one that an earlier attempt has left open."""
        self._launched(f"attempt {self.attempt.number} started the stage train", "handed over to training")

    def _launched(self, evidence: str, outcome: str) -> None:
        left = [phase.id for phase in read_phases(self.ledger) if phase.name == PHASE and phase.is_open]
        self._phase = self._phase or (left[-1] if left else "")
        if not self._phase:
            return
        open_ = {todo.id for p in read_phases(self.ledger) for todo in p.todos if todo.status in _UNTRIED}
        if any(f"{self._phase}/{key}" in open_ for key in _CONTENTS if key != "training"):
            self.captured()  # the run was killed between its last commit and its closing steps
        self._change("training", "completed", evidence)
        self._book.close_phase(self._phase, outcome)
        self._phase = ""

    def _do(self, key: str, step: Callable[[], str]) -> None:
        try:
            self._change(key, "completed", step())
        except (EyasError, OSError) as error:
            self._change(key, "blocked", " ".join(str(error).splitlines()))

    def _change(self, key: str, status: str, evidence: str) -> None:
        id_ = f"{self._phase}/{key}"
        keys = list(_CONTENTS)
        place = keys.index(key)
        before = (f"{self._phase}/{keys[place - 1]}",) if place else ()
        self._book.put(Todo(id_, _CONTENTS[key], "high", status, before, evidence, ""))

    def _stop_servers(self) -> str:
        book = ServerBook(self.project.layout.servers)
        if not book.read():
            return "no server of eyas runs"
        stopped, in_use = stop_servers(book, self.project.config.serve)
        said = [f"{record.url}: process and port gone, GPU memory {gpu}" for record, gpu in stopped]
        return "; ".join([*said, *(f"{record.url} is in use" for record in in_use)])

    def _prove_gpus(self) -> str:
        gpus = self.gpus.read()
        if not gpus:
            return "no GPU on this machine"
        return "used: " + ", ".join(f"GPU {gpu.index} {format_bytes(gpu.used_bytes)}" for gpu in gpus)

    def _restore_patches(self) -> str:
        layout = self.project.layout
        patches = Patches(self.project.config.serve, layout.root, layout.state / "patches")
        said = []
        for name in patches.names():
            view = patches.look(name)
            if view.state == "applied" and view.applied_at is not None:
                view = patches.restore(name)
            said.append(f"{name}: {view.state}")
        return "; ".join(said) or "no edit of an engine's source is declared"

    def _check_mapping(self) -> str:
        vocabulary = self.project.layout.vocabulary
        if not is_sealed(vocabulary):
            return "no draft vocabulary yet: training makes it from the stored samples"
        faults = seal_faults(vocabulary, deep=False)
        return f"sealed; {'; '.join(faults)}" if faults else "the draft vocabulary is sealed and whole"


_CONTENTS = {
    "capture": "Capture every sample",
    "servers": "Stop the servers that captured",
    "gpus": "See that GPU memory is free",
    "patches": "Restore the engine's source",
    "mapping": "Check the draft vocabulary",
    "training": "Launch training",
}
