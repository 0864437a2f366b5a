"""Certificates for servers on loopback."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


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
