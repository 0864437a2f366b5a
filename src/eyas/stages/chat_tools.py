"""The target's tokenizer and template, as prepare, regenerate and evaluate use them."""

from __future__ import annotations

from typing import Any

from eyas.base.errors import TargetError
from eyas.chat.render import Renderer
from eyas.stages.project import Project


def load_tokenizer(project: Project) -> Any:
    """The target's tokenizer; nothing is fetched from anywhere.

    Raises:
        TargetError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    model = project.resolved.model
    try:
        return AutoTokenizer.from_pretrained(
            model, local_files_only=True, trust_remote_code=project.config.target.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TargetError(
            "the target's tokenizer cannot be loaded",
            where=model,
            why=(str(error).strip().splitlines() or [type(error).__name__])[0],
            hint="the folder needs tokenizer.json; set target.trust_remote_code if it brings its own code",
        ) from error


def end_tokens(project: Project, tokenizer: Any) -> list[int]:
    """All ids at which the target ends an answer: of its configuration and its tokenizer.

    Raises:
        TargetError: neither names one.
    """
    found = list(project.resolved.facts.end_tokens)
    own = getattr(tokenizer, "eos_token_id", None)
    if own is not None and own not in found:
        found.append(int(own))
    if not found:
        raise TargetError(
            "the target names no end token",
            where=project.resolved.model,
            hint="add eos_token_id to its generation_config.json",
        )
    return found


def load_renderer(project: Project) -> Renderer:
    """A renderer with the target's tokenizer. Raises TargetError."""
    tokenizer = load_tokenizer(project)
    return Renderer(tokenizer, end_tokens(project, tokenizer))
