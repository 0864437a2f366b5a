"""Small requests to a server: cheap without https, and never to one that is not trusted."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.targets.local.model import LocalTarget
from eyas.targets.serving.address import Address
from tests.projects import tiny_target
from tests.stages.served.conftest import make_certificate as make_certificate
from tests.targets.server.fakes import fake_server, tiny_server_model


def test_plain_http_reads_no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("certificates are read, which takes twenty times as long as the request")

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", refuse)
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", refuse)
    assert Address("http://127.0.0.1:9").health() == "refused"
    with pytest.raises(AssertionError, match="certificates are read"):
        Address("https://127.0.0.1:9").health()


def test_https_asks_whom_it_trusts(make_certificate: Callable[[], tuple[Path, Path]], tmp_path: Path) -> None:
    certificate, key = make_certificate()
    folder = tiny_target(tmp_path / "model")
    model = tiny_server_model(LocalTarget.load(folder), "vllm", (1, 3, 5))
    with fake_server(model, folder, "vllm", None, certificate=certificate, key=key) as server:
        assert server.url.startswith("https://")
        assert Address(server.url).health() == "refused"
        assert Address(server.url, ca_file=str(certificate)).health() == "ok"
