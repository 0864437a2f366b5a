from __future__ import annotations

import pytest

from eyas.drafter.kernels import compiled


@pytest.fixture(params=["compiled", "operations"])
def passes(request, monkeypatch):
    """The test runs with the compiled passes over rows and with torch's operations in their place."""
    if request.param == "compiled" and (reason := compiled.why_not()):
        pytest.skip(f"no compiled passes: {reason}")
    monkeypatch.setitem(compiled.USE, "compiled", request.param == "compiled")
    return request.param
