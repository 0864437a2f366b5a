"""Is every file outside the project there that the run needs?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.base.seal import file_digest
from eyas.base.units import counted
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene


@dataclass(frozen=True)
class NeededFile:
    """A file by its digest: None when it is not there."""

    path: str
    source: str
    found: str | None
    source_found: str | None
    wanted: str | None


@dataclass(frozen=True)
class FileFacts:
    """Needed files, and data sources that are not there."""

    needed: tuple[NeededFile, ...]
    num_sources: int
    lost_sources: tuple[str, ...]


def look(scene: Scene) -> FileFacts:
    project, needed = scene.project, []
    for entry in project.config.recovery.files:
        path, source = Path(entry.path).expanduser(), project.source_path(entry.source)
        source_found = _digest(source)
        wanted = entry.sha256 or source_found
        needed.append(NeededFile(str(path), str(source), _digest(path), source_found, wanted))
    sources = [project.source_path(source.path) for source in project.config.data.sources]
    lost = tuple(str(path) for path in sources if not path.is_file())
    return FileFacts(tuple(needed), len(sources), lost)


def _digest(path: Path) -> str | None:
    return file_digest(path) if path.is_file() else None


def judge(scene: Scene, facts: FileFacts) -> Line:
    findings, evidence = [], []
    for file in facts.needed:
        evidence.append(
            f"{file.path}: {(file.found or 'missing')[:16]}, wanted {(file.wanted or 'unknown')[:16]}"
        )
        if file.found is not None and file.found == file.wanted:
            continue
        detail = {"path": file.path, "source": file.source, "sha256": file.wanted}
        if file.wanted is None or file.source_found != file.wanted:
            why = "is not there" if file.source_found is None else "has another hash than recovery.files says"
            findings.append(
                Finding(
                    "file-source-lost",
                    file.path,
                    "failed",
                    f"{file.path} is needed, and its copy {why}",
                    (f"copy: {file.source}",),
                    mend=f"bring {file.source} back, then: eyas recover",
                )
            )
        elif file.found is None:
            what = f"{file.path} is gone"
            findings.append(
                Finding("file-missing", file.path, "failed", what, (f"copy: {file.source}",), detail=detail)
            )
        else:
            what = f"{file.path} is not what it has to be"
            why = f"its hash is {file.found[:16]}, wanted {file.wanted[:16]}"
            findings.append(Finding("file-changed", file.path, "failed", what, (why,), detail=detail))
    for path in facts.lost_sources:
        findings.append(
            Finding(
                "source-missing",
                path,
                "failed",
                f"a data source is gone: {Path(path).name}",
                (path,),
                mend=f"bring {path} back, or mend data.sources in eyas.toml",
            )
        )
    needed = f"{counted(len(facts.needed), 'needed file')} and " if facts.needed else ""
    said = f"{needed}{counted(facts.num_sources, 'data source')} there"
    return verdict("files", findings, said, evidence)


CHECK = Check("files", look, judge)
