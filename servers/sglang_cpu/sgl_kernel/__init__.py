"""Stands in for SGLang's compiled kernels, which have no CPU wheel; a call of any of them fails.

With the torch_native attention and PyTorch sampling no kernel is called in prefill and plain decoding,
but the modules that could call one import their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*words: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on this machine")

    return kernel
