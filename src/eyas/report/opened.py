"""A project for programs and notebooks: what status and report show, tables, samples and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.base.errors import DamageFound, DataError
from eyas.base.layout import Layout
from eyas.pipeline.attempt import attempt_folders, read_events
from eyas.pipeline.given import given_to_last_run
from eyas.report.curves import training_rows
from eyas.report.overview import Overview, overview
from eyas.report.status import ProjectStatus, project_status
from eyas.stages.project import Project
from eyas.store.ledger import Ledger

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from eyas.store.samples import Sample
    from eyas.store.tensors import StoredTensor

_SAMPLE_NUMBERS = ("length", "num_supervised")
_SAMPLE_COLUMNS = [
    "id", "length", "num_supervised", "split", "source", "domain", "conversation", "finish_reason", "origin",
]  # fmt: skip


@dataclass(frozen=True)
class States:
    """Captured states of one sample, as the store holds them.

    Args:
        tokens: int32 ``[T]``.
        spans: half-open token ranges written by the assistant.
        aux: ``[T, A, H]``; float32 where the store holds 16 bits, without loss.
        last: ``[rows, H]``, likewise.
        last_rows: int64 ``[rows]``: the row of each last state (those whose next token is supervised).
    """

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    spans: tuple[tuple[int, int], ...]
    aux: np.ndarray[Any, Any]
    last: np.ndarray[Any, Any]
    last_rows: np.ndarray[Any, np.dtype[np.int64]]


class OpenedProject:
    """A project that can be looked at; nothing here changes it, also while it runs.

    Tables are pyarrow's: ``.to_pandas()`` where pandas is installed.
    """

    def __init__(self, project: Project) -> None:
        self._project = project

    def __repr__(self) -> str:
        return f"eyas.open({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The project folder."""
        return self._project.layout.root

    def status(self) -> ProjectStatus:
        """What ``eyas status --json`` prints, as objects."""
        return project_status(self._project)

    def report(self) -> Overview:
        """What ``eyas report`` and the dashboard show, as objects."""
        return overview(self._project)

    def samples(self) -> pa.Table:
        """All samples: where each comes from and where it stands.

        Columns: id, length, num_supervised, split, source, domain, conversation, finish_reason, origin,
        and from the ledger state, segment, failures, reason (null before extraction).

        Raises:
            DataError: there are no samples yet.
            DamageFound: they cannot be read.
        """
        import pyarrow as pa

        table = pa.concat_tables([_read(path, columns=_SAMPLE_COLUMNS) for path in self._sample_parts()])
        known = self._ledger_rows()
        rows = [known.get(name, (None, None, None, None)) for name in table.column("id").to_pylist()]
        kinds = (
            ("state", pa.string()),
            ("segment", pa.string()),
            ("failures", pa.int32()),
            ("reason", pa.string()),
        )
        for place, (name, kind) in enumerate(kinds):
            table = table.append_column(name, pa.array([row[place] for row in rows], kind))
        return table

    def sample(self, sample: str) -> Sample:
        """One sample with its tokens and spans.

        Raises:
            KeyError: there is no such sample.
            DataError: there are no samples yet.
            DamageFound: the samples cannot be read.
        """
        import numpy as np

        from eyas.store.samples import Sample

        for path in self._sample_parts():
            for row in _read(path, filters=[("id", "=", sample)]).to_pylist():
                texts = {name: row[name] for name in _SAMPLE_COLUMNS if name not in _SAMPLE_NUMBERS}
                spans = tuple((start, end) for start, end in row["spans"])
                return Sample(tokens=np.array(row["tokens"], dtype=np.int32), spans=spans, **texts)
        raise KeyError(sample)

    def states(self, sample: str) -> States:
        """Captured states of one sample, hashed before they are given.

        Raises:
            KeyError: it is not stored: not captured yet, or trained on and released (``store.max_bytes``).
            SegmentDamaged: its segment is missing or damaged.
            NotReady: there is no ledger yet.
        """
        from eyas.store.reader import StoreReader
        from eyas.store.samples import last_rows

        with Ledger.open_read_only(self._project.layout.ledger) as ledger, ledger.reading() as connection:
            row = connection.execute(
                "SELECT segment FROM samples WHERE id = ? AND state = 'stored'", (sample,)
            ).fetchone()
        if row is None:
            raise KeyError(sample)
        captured = StoreReader(self._project.layout.segments, {sample: row[0]}).sample(sample, check=True)
        return States(
            tokens=captured.tokens.copy(),
            spans=tuple(captured.spans),
            aux=_numbers(captured.aux),
            last=_numbers(captured.last),
            last_rows=last_rows(captured.spans, len(captured.tokens)),
        )

    def stored_ids(self) -> list[str]:
        """Ids of all samples whose states can be read, sorted. Raises NotReady before the first run."""
        with Ledger.open_read_only(self._project.layout.ledger) as ledger:
            return [sample for sample, _ in ledger.stored()]

    def training(self) -> pa.Table:
        """Every training step: step, at, epoch, loss, step_loss, lr, grad_norm, tokens, and how fast."""
        return _table(training_rows(self._project.layout.metrics, "train"))

    def validations(self) -> pa.Table:
        """Every validation: step, at, loss, top1, acceptance, conditional (lists by draft step), walk_tau."""
        return _table(training_rows(self._project.layout.metrics, "validation"))

    def events(self, attempt: int | None = None) -> pa.Table:
        """Events of one attempt or of all: attempt, at, event, and the rest as JSON text in ``detail``."""
        import json

        rows = []
        for folder in attempt_folders(self._project.layout.logs):
            number = int(folder.name.rpartition("-")[2])
            if attempt in (None, number):
                rows += [
                    {
                        "attempt": number,
                        "at": event.pop("at"),
                        "event": event.pop("event"),
                        "detail": json.dumps(event, ensure_ascii=False, default=str),
                    }
                    for event in read_events(folder)
                ]
        return _table(rows)

    def attempts(self) -> pa.Table:
        """All attempts: name, verb, started, last_event, seconds, outcome, what."""
        names = ("name", "verb", "started", "last_event", "seconds", "outcome", "what")
        return _table([{name: getattr(a, name) for name in names} for a in self.report().attempts])

    def segments(self) -> pa.Table:
        """Segments of the store, as the ledger knows them. Raises NotReady before the first run."""
        with Ledger.open_read_only(self._project.layout.ledger) as ledger:
            return _table([asdict(segment) for segment in ledger.segments()])

    def _sample_parts(self) -> list[Path]:
        folder = self._project.layout.samples
        parts = sorted(folder.glob("part-*.parquet"))
        if not parts:
            raise DataError("there are no samples yet", where=folder, hint="eyas run")
        return parts

    def _ledger_rows(self) -> dict[str, Sequence[Any]]:
        if not self._project.layout.ledger.exists():
            return {}
        with Ledger.open_read_only(self._project.layout.ledger) as ledger, ledger.reading() as connection:
            rows = connection.execute("SELECT id, state, segment, failures, reason FROM samples").fetchall()
        return {row[0]: row[1:] for row in rows}


def open_project(path: str | Path = ".", overrides: Sequence[str] = ()) -> OpenedProject:
    """Open a project folder to look at it, as its last run was given it; `eyas.open` is this function.

    Args:
        path: the folder that holds ``eyas.toml``.
        overrides: values to take instead, as in ``["train.lr=1e-4"]``.

    Raises:
        NoProject: there is no project.
        ConfigError: its configuration cannot be used.
    """
    given = given_to_last_run(Layout(Path(path).resolve()))
    return OpenedProject(Project.open(Path(path), [*(given.values if given else ()), *overrides]))


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_pylist(rows)


def _read(path: Path, **options: Any) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path, **options)
    except (pa.ArrowException, OSError) as error:
        raise DamageFound("samples cannot be read", where=path, why=str(error), hint="eyas verify") from error


def _numbers(tensor: StoredTensor) -> np.ndarray[Any, Any]:
    """A copy that numpy can calculate with, float32 where the store holds 16 bits."""
    from eyas.store.tensors import to_float32

    return tensor.array.copy() if tensor.dtype == "F64" else to_float32(tensor).copy()
