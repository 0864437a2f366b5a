"""Which files hold a target's weights, read without loading any of them."""

from __future__ import annotations

import json
from pathlib import Path

from eyas.base.errors import TargetError

INDEX_NAME = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def weight_files(model: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted by name.

    With an index, exactly the files that it names; otherwise ``model.safetensors``, or every
    safetensors file of the folder.

    Raises:
        TargetError: there are none, one is missing, or the weights are pickles.
    """
    index = model / INDEX_NAME
    if index.is_file():
        names = sorted(set(read_index(model).values()))
        missing = [name for name in names if not (model / name).is_file()]
        if missing:
            raise TargetError(
                f"{len(missing)} of {len(names)} weight files are missing",
                where=model,
                why=f"{INDEX_NAME} names {', '.join(missing[:3])}",
                hint="finish the download of the target",
            )
        return [model / name for name in names]
    single = model / "model.safetensors"
    files = [single] if single.is_file() else sorted(model.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(path.name for pattern in _PICKLES for path in model.glob(pattern))
    if pickles:
        raise TargetError(
            "the target's weights are pickles, which eyas does not open",
            where=model,
            why=f"found {', '.join(pickles[:3])}; unpickling can run code",
            hint="save the model again with save_pretrained(folder), which writes safetensors",
        )
    raise TargetError(
        "the target has no safetensors",
        where=model,
        hint="set target.model to a folder that holds config.json, a tokenizer and safetensors",
    )


def read_index(model: Path) -> dict[str, str]:
    """Tensor name to file name from the index of a sharded checkpoint.

    Raises:
        TargetError: the index cannot be read, or a name in it leaves the folder.
    """
    path = model / INDEX_NAME
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        found = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise TargetError("the index of the weights cannot be read", where=path, why=str(error)) from error
    for file in found.values():
        if Path(file).name != file:
            raise TargetError("the index names a file outside the folder", where=path, why=file)
    return found
