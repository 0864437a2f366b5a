"""The commands that serve an export; no torch."""

from __future__ import annotations

import shlex


def vllm_command(target: str, drafter: str, num_drafts: int) -> str:
    """The command that serves ``target`` with ``drafter`` in vLLM, a chain of ``num_drafts``."""
    speculative = f'{{"method":"eagle3","model":"{drafter}","num_speculative_tokens":{num_drafts}}}'
    return (
        "python -m vllm.entrypoints.openai.api_server \\\n"
        f"  --model {shlex.quote(target)} \\\n"
        f"  --speculative-config {shlex.quote(speculative)}"
    )


def sglang_command(target: str, drafter: str, num_drafts: int) -> str:
    """The command that serves ``target`` with ``drafter`` in SGLang, a chain of ``num_drafts``."""
    return (
        "python -m sglang.launch_server \\\n"
        f"  --model-path {shlex.quote(target)} \\\n"
        f"  --speculative-algorithm EAGLE3 --speculative-draft-model-path {shlex.quote(drafter)} \\\n"
        f"  --speculative-num-steps {num_drafts} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {num_drafts + 1}"
    )
