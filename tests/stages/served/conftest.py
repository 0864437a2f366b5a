"""A tiny target, a project ready to be captured, and fake servers for it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eyas.targets.local.model import LocalTarget
from tests.cli.command import eyas
from tests.projects import make_project, tiny_target
from tests.stages.served.helping import Servers


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def model(target: Path) -> LocalTarget:
    return LocalTarget.load(target)


@pytest.fixture(scope="module")
def answered(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose samples are ready to be captured."""
    root = make_project(tmp_path_factory.mktemp("answered") / "p", target)
    assert eyas("run", "--project", root, "--until", "regenerate").code == 0
    return root


@pytest.fixture
def project(answered: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(answered, tmp_path / "p", symlinks=True))


@pytest.fixture
def servers(
    monkeypatch: pytest.MonkeyPatch, model: LocalTarget, target: Path, tmp_path: Path
) -> Iterator[Servers]:
    found = Servers(monkeypatch, model, target, tmp_path)
    yield found
    found.close()


@pytest.fixture
def make_certificate(tmp_path: Path) -> Callable[[], tuple[Path, Path]]:
    """Make a self-signed certificate for 127.0.0.1 and its key, as PEM files."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificate can be made")

    def make() -> tuple[Path, Path]:
        certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        words += ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run(words, check=True, capture_output=True)
        return certificate, key

    return make


@pytest.fixture(scope="module")
def prepared(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose prompts are ready to be answered."""
    root = make_project(tmp_path_factory.mktemp("prepared") / "p", target)
    assert eyas("prepare", "--project", root).code == 0
    return root


@pytest.fixture
def unanswered(prepared: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes copies of it, by name."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(prepared, tmp_path / name, symlinks=True))

    return make
