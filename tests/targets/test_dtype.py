"""Choice of device and arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.base.errors import ConfigError
from eyas.targets.dtype import resolve_device, resolve_dtype, torch_dtype


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse\n", "bfloat16"),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", "bfloat16"),
        ("Features\t: fp asimd bf16\n", "bfloat16"),
        ("flags\t\t: fpu avx2 sse avx512f\n", "float32"),
        ("model name\t: avx512_bf16\n", "float32"),
        ("", "float32"),
    ],
)
def test_auto_on_a_cpu(tmp_path: Path, text: str, expected: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    value, reason = resolve_dtype("auto", "cpu", cpuinfo=cpuinfo)
    assert value == expected
    assert "bfloat16" in reason
    assert resolve_dtype("auto", "cpu", cpuinfo=tmp_path / "absent")[0] == "float32"


def test_auto_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, s=supported: s)
        assert resolve_dtype("auto", "cuda:0")[0] == expected


def test_what_is_given_is_taken() -> None:
    assert resolve_dtype("float64", "cpu") == ("float64", "as configured")
    assert resolve_device("cpu") == ("cpu", "as configured")
    assert resolve_device("auto")[0] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert torch_dtype("bfloat16") is torch.bfloat16


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown dtype"):
        resolve_dtype("int8", "cpu")
    with pytest.raises(ConfigError, match="unknown device"):
        resolve_device("gpu")
    with pytest.raises(ConfigError, match="not here"):
        resolve_device("cuda:97")
