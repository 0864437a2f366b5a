"""What another tool left: one pickled file a sample, in ``rows_A-B`` folders; two of the files are not whole.

Tokens and states come from transformers alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS_A_FOLDER = 8


def write_old_run(folder: Path, model_folder: Path, layers: tuple[int, ...], count: int) -> None:
    """Write ``chats.jsonl`` and ``old-run/`` into ``folder``: states of ``count`` conversations."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    chats, paths = [], []
    for number in range(count):
        messages = [
            {"role": "user", "content": f"What is {number} times 3?"},
            {"role": "assistant", "content": f"{number} times 3 is {number * 3}."},
        ]
        chats.append(json.dumps({"messages": messages}))
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text.rstrip("\n"), add_special_tokens=False, return_tensors="pt")["input_ids"]
        start = len(tokenizer(asked, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
        mask = (torch.arange(ids.shape[1]) >= start).to(torch.int64)
        first = number // ROWS_A_FOLDER * ROWS_A_FOLDER
        path = folder / "old-run" / f"rows_{first}-{first + ROWS_A_FOLDER}" / f"data_{number}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "input_ids": ids[0],
                "loss_mask": mask,
                "aux_hidden_state": torch.cat([hidden[k] for k in layers], dim=-1).to(torch.bfloat16),
                "hidden_state": hidden[-1].to(torch.bfloat16),
            },
            path,
        )
        paths.append(path)
    os.truncate(paths[2], 0)
    os.truncate(paths[5], paths[5].stat().st_size // 2)
    (folder / "chats.jsonl").write_text("\n".join(chats) + "\n")
