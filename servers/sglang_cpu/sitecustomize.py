"""Lets the torchvision wheel load beside a torch that its operators were not built for.

SGLang's text path imports torchvision's Python code and calls none of its operators, but that code
registers shapes for them by name. The names are defined just before torchvision is first imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Steps in once, when torchvision is looked for, and finds nothing itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _define_operators()
        return None


def _define_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


_kept: list[object] = []
"""A library's definitions go with it."""

sys.meta_path.insert(0, _BeforeTorchvision())
