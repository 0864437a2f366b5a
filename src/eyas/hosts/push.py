"""Putting a project and exactly this eyas on another machine."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import posixpath
import re
import secrets
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas import __version__
from eyas.base.clock import utc_now_text
from eyas.base.errors import ConfigError, HostUnreachable
from eyas.base.layout import CONFIG_NAME
from eyas.base.seal import file_digest
from eyas.base.units import counted
from eyas.config.machines import HostConfig
from eyas.config.schema import EyasConfig
from eyas.hosts.host import Host, Result

PACKAGES = ("eyas", "eyas_engine")
_TRANSFER_SECONDS = 3600.0


@dataclass(frozen=True)
class Pushed:
    """What lies on the host now.

    Attributes:
        eyas: folder of the package, named by its content.
        sent: files of the project that were sent; ``kept`` ones were the same already.
        set_aside: files that were there otherwise and were moved to the project's set-aside/ there.
    """

    host: str
    eyas: str
    project: str
    sent: tuple[str, ...]
    kept: tuple[str, ...]
    set_aside: tuple[str, ...]


def package_archive() -> bytes:
    """This eyas as a tar.gz; the same files give the same bytes."""
    source = Path(__file__).parents[2]
    raw = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for package in PACKAGES:
            for path in sorted((source / package).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    entry = tarfile.TarInfo(path.relative_to(source).as_posix())
                    entry.size = path.stat().st_size
                    entry.mode = 0o644
                    with open(path, "rb") as file:
                        archive.addfile(entry, file)
    return raw.getvalue()


def package_folder(host: Host, archive: bytes) -> str:
    """Where this eyas lies there: in the user's home, by version and content. Raises HostUnreachable."""
    home = _must(host, ["printenv", "HOME"]).out.strip()
    return posixpath.join(home, ".eyas", f"eyas-{__version__}-{hashlib.sha256(archive).hexdigest()[:16]}")


def is_there(host: Host, folder: str) -> bool:
    """Whether this eyas was pushed to the host."""
    return host.run(["test", "-d", folder]).ok


def command(spec: HostConfig, folder: str, words: Sequence[str]) -> list[str]:
    """The argument list that runs a verb of the pushed eyas there."""
    return ["env", f"PYTHONPATH={folder}", "PYTHONUNBUFFERED=1", spec.python, "-m", "eyas", *words]


def project_files(root: Path, config: EyasConfig) -> list[str]:
    """What of a project is pushed: configuration, sources and copies inside of it, and data/."""
    wanted = {CONFIG_NAME}
    named = [source.path for source in config.data.sources]
    named += [needed.source for needed in config.recovery.files]
    for text in named:
        path = (root / Path(text).expanduser()).resolve()
        if path.is_relative_to(root) and path.is_file():
            wanted.add(path.relative_to(root).as_posix())
    data = root / "data"
    wanted |= (
        {p.relative_to(root).as_posix() for p in data.rglob("*") if p.is_file()} if data.is_dir() else set()
    )
    return sorted(name for name in wanted if not Path(name).name.startswith("."))


def project_place(spec: HostConfig) -> str:
    """Where the project lies there. Raises ConfigError when eyas.toml does not say."""
    if spec.project is None or not spec.project.startswith("/"):
        raise ConfigError(
            f"hosts.{spec.name} does not say where the project lies there",
            hint='add project = "/absolute/folder" to that host in eyas.toml',
        )
    return spec.project.rstrip("/")


def push(host: Host, spec: HostConfig, root: Path, config: EyasConfig, say: Callable[[str], None]) -> Pushed:
    """Send what is missing or different; nothing there is overwritten without being set aside first.

    Raises:
        HostUnreachable: the host does not answer, or something arrived otherwise than it was sent.
        ConfigError: its Python cannot import what eyas needs.
    """
    place, archive = project_place(spec), package_archive()
    folder = package_folder(host, archive)
    if is_there(host, folder):
        say(f"this eyas is there already: {folder}")
    else:
        say(f"sending eyas {__version__}, {len(archive):,} bytes")
        _send_folder(host, archive, folder)
    _require_python(host, spec, folder)
    names = project_files(root, config)
    there = _digests(host, place, names)
    digests = {name: file_digest(root / name) for name in names}
    differing = [name for name in names if there.get(name) != digests[name]]
    aside = tuple(name for name in differing if name in there)
    if differing:
        say(f"sending {counted(len(differing), 'file')} of the project")
        _send_files(host, root, place, differing, aside)
    arrived = _digests(host, place, names)
    wrong = [name for name in names if arrived.get(name) != digests[name]]
    if wrong:
        raise HostUnreachable(
            f"{counted(len(wrong), 'file')} did not arrive as sent", where=f"{spec.name}:{place}/{wrong[0]}"
        )
    kept = tuple(name for name in names if name not in differing)
    return Pushed(spec.name, folder, place, tuple(differing), kept, aside)


def _must(host: Host, argv: Sequence[str], seconds: float = 60.0) -> Result:
    result = host.run(argv, timeout_seconds=seconds)
    if not result.ok:
        raise HostUnreachable(f"a command failed on {host.name}", where=argv[0], why=result.explain())
    return result


def _send(host: Host, content: io.BufferedIOBase | bytes, digest: str, path: str) -> None:
    """Write a file there and compare its hash."""
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.write(content if isinstance(content, bytes) else content.read())
        file.seek(0)
        result = host.run(["dd", f"of={path}", "status=none"], timeout_seconds=_TRANSFER_SECONDS, stdin=file)
    if not result.ok:
        raise HostUnreachable(f"sending to {host.name} failed", where=path, why=result.explain())
    found = _must(host, ["sha256sum", "--", path], _TRANSFER_SECONDS).out.split()[0]
    if found != digest:
        raise HostUnreachable(f"what arrived on {host.name} is not what was sent", where=path)


def _send_folder(host: Host, archive: bytes, folder: str) -> None:
    """Unpack under a temporary name, then rename: the folder is whole or not there."""
    temporary = f"{folder}.{secrets.token_hex(4)}.tmp"
    _must(host, ["mkdir", "-p", "--", temporary])
    _send(host, archive, hashlib.sha256(archive).hexdigest(), f"{temporary}/package.tar.gz")
    _must(host, ["tar", "-x", "-z", "-f", f"{temporary}/package.tar.gz", "-C", temporary])
    _must(host, ["mv", "-T", "--", temporary, folder])


def _send_files(host: Host, root: Path, place: str, names: Sequence[str], aside: Sequence[str]) -> None:
    import tempfile

    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name in names:
                archive.add(root / name, name, recursive=False)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        temporary = f"{place}/.push.{secrets.token_hex(4)}.tmp"
        _must(host, ["mkdir", "-p", "--", place])
        _send(host, file, digest, temporary)
    stamp = re.sub(r"[^0-9T]", "", utc_now_text().split(".")[0])
    for name in aside:
        kept = f"{place}/set-aside/{stamp}-pushed/{name}"
        _must(host, ["mkdir", "-p", "--", posixpath.dirname(kept)])
        _must(host, ["mv", "-T", "--", f"{place}/{name}", kept])
    _must(host, ["tar", "-x", "-f", temporary, "-C", place, "--no-same-owner"], _TRANSFER_SECONDS)
    _must(host, ["rm", "--", temporary])


def _digests(host: Host, place: str, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of the files that are there."""
    found = {}
    for start in range(0, len(names), 200):
        paths = [f"{place}/{name}" for name in names[start : start + 200]]
        result = host.run(["sha256sum", "--", *paths], timeout_seconds=_TRANSFER_SECONDS)
        for line in result.out.splitlines():
            digest, _, path = line.partition("  ")
            if path.startswith(f"{place}/"):
                found[path.removeprefix(f"{place}/")] = digest
    return found


def _require_python(host: Host, spec: HostConfig, folder: str) -> None:
    code = "import eyas.cli.main, eyas.recovery.doctor, pydantic, pyarrow, safetensors, xxhash, psutil"
    result = host.run(["env", f"PYTHONPATH={folder}", spec.python, "-c", code], timeout_seconds=120.0)
    if not result.ok:
        needs = [text.split(";")[0].strip() for text in importlib.metadata.requires("eyas") or []]
        wanted = " ".join(f"'{text}'" for text in needs if "extra ==" not in text)
        raise ConfigError(
            f"the Python of {spec.name} cannot run eyas",
            where=f"hosts.{spec.name}.python = {spec.python}",
            why=result.explain(),
            hint=f"there: {spec.python} -m pip install {wanted}",
        )
