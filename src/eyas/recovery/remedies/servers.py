"""Servers of eyas that are left over or silent, their dumps, and edits of the engine's source."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.base.files import set_aside
from eyas.base.units import format_bytes, parse_bytes
from eyas.pipeline.lock import hold_lock
from eyas.recovery.bench import Bench, Proof, Way
from eyas.recovery.checks.patches import patches_of
from eyas.recovery.findings import Finding


@dataclass(frozen=True)
class StopServers:
    """Ends servers that eyas started and nobody works with; the run starts and proves new ones."""

    findings: tuple[Finding, ...]

    def blocked(self, bench: Bench) -> str | None:
        return None

    def ways(self, bench: Bench) -> Sequence[Way]:
        return [Way("stop servers that nobody works with", lambda: self._stop(bench))]

    def _stop(self, bench: Bench) -> str:
        from eyas.targets.serving.overview import stop_servers
        from eyas.targets.serving.records import ServerBook

        layout = bench.scene.layout
        with hold_lock(layout.state, "recover"):
            # recovery deletes nothing: what they left is for `DumpsAside`
            serve = bench.scene.project.config.serve
            stopped, in_use = stop_servers(ServerBook(layout.servers), serve, keep_dumps=True)
        said = [f"{record.url}: process and port gone, GPU memory {gpu}" for record, gpu in stopped]
        return "; ".join([*said, *(f"{record.url} is in use" for record in in_use)]) or "none was left"

    def proof(self, bench: Bench) -> Proof:
        left = bench.still([finding.key for finding in self.findings], ["servers"])
        return Proof(not left, left[0].what if left else "no server is left over or silent")


@dataclass(frozen=True)
class DumpsAside:
    """Dumps of dead servers of this project moved to set-aside/: their samples are captured again."""

    findings: tuple[Finding, ...]

    def _bytes(self) -> int:
        return sum(int(finding.detail["bytes"]) for finding in self.findings)

    def blocked(self, bench: Bench) -> str | None:
        config, layout = bench.scene.project.config, bench.scene.layout
        room = shutil.disk_usage(layout.root).free - parse_bytes(config.disk.reserve)
        if self._bytes() < room:
            return None
        places = " ".join(str(finding.detail["path"]) for finding in self.findings)
        return f"{format_bytes(self._bytes())} do not fit into set-aside/; nothing needs them: rm -r {places}"

    def ways(self, bench: Bench) -> Sequence[Way]:
        return [Way("move them to set-aside/", lambda: self._aside(bench))]

    def _aside(self, bench: Bench) -> str:
        layout, num_moved = bench.scene.layout, 0
        with hold_lock(layout.state, "recover"):
            for finding in self.findings:
                path = Path(str(finding.detail["path"]))
                if path.is_dir():
                    set_aside(path, layout.set_aside, finding.what)
                    num_moved += 1
        return (
            f"{num_moved} of {len(self.findings)} folders, {format_bytes(self._bytes())} when they were found"
        )

    def proof(self, bench: Bench) -> Proof:
        left = bench.still([finding.key for finding in self.findings], ["dumps"])
        return Proof(not left, left[0].what if left else "no dump of a dead server is left")


@dataclass(frozen=True)
class SetPatch:
    """Applies or restores one edit of the engine's source, verified by hash."""

    finding: Finding

    def blocked(self, bench: Bench) -> str | None:
        return None

    def ways(self, bench: Bench) -> Sequence[Way]:
        name = self.finding.subject
        patches = patches_of(bench.scene)
        if self.finding.code == "patch-left":
            return [Way(f"restore {name}", lambda: patches.restore(name).state)]
        return [Way(f"apply {name}", lambda: patches.apply(name).state)]

    def proof(self, bench: Bench) -> Proof:
        view = patches_of(bench.look()).look(self.finding.subject)
        wanted = "not applied" if self.finding.code == "patch-left" else "applied"
        return Proof(view.state == wanted, f"{view.path}: {view.state}, sha256 {(view.sha256 or '')[:16]}")
