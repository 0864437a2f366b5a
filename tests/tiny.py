"""Tiny random targets of several kinds, with a small real tokenizer, saved as ordinary model folders.

Weights are larger than a fresh model's, so that greedy decoding does not fall into one token and
layers differ from each other by much more than rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 336
HIDDEN_SIZE = 64
NUM_LAYERS = 6
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = 0, 1, 2
KINDS = ("llama", "qwen3", "deepseek_v3", "nested", "sliding", "gpt2", "recurrent")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TEXT = (
    "a falcon waits on the high wall and watches the field below",
    "the user asks a short question and the assistant gives an answer",
    "what is the sum of two and three? the sum is five.",
    "system user assistant\n",
    "write a function that returns the largest number:\ndef largest(numbers):\n    return max(numbers)",
    "name the river that runs through the old town, and the year in which the bridge was built.",
)


def tiny_tokenizer() -> Any:
    """A byte-level BPE of `VOCAB_SIZE` tokens with a chatml-like template; the same at every call."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def _sizes(num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": TURN_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


def tiny_config(kind: str = "llama", *, num_layers: int = NUM_LAYERS, **changes: Any) -> Any:
    """The transformers configuration of one kind of `KINDS`; ``changes`` go to the text sizes."""
    import transformers as t

    sizes = _sizes(num_layers) | changes
    if kind == "llama":
        return t.LlamaConfig(**({"tie_word_embeddings": True} | sizes))
    if kind == "qwen3":
        return t.Qwen3Config(**({"tie_word_embeddings": False} | sizes))
    if kind == "deepseek_v3":
        sizes |= {
            "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
            "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        }  # fmt: skip
        sizes.pop("head_dim")
        return t.DeepseekV3Config(**sizes)
    if kind == "nested":
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}  # fmt: skip
        text = t.MistralConfig(**({"sliding_window": None} | sizes))
        return t.Mistral3Config(
            text_config=text.to_dict(), vision_config={"model_type": "pixtral"} | vision,
            image_token_index=VOCAB_SIZE - 1, eos_token_id=TURN_END_ID,
            tie_word_embeddings=bool(sizes.get("tie_word_embeddings", False)),
        )  # fmt: skip
    if kind == "sliding":
        types = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(num_layers)]
        return t.Gemma3TextConfig(
            **({"sliding_window": 8, "layer_types": types, "query_pre_attn_scalar": 16} | sizes)
        )
    if kind == "gpt2":
        return t.GPT2Config(
            vocab_size=VOCAB_SIZE, n_embd=HIDDEN_SIZE, n_layer=num_layers, n_head=4, n_positions=512,
            initializer_range=0.15, bos_token_id=None, eos_token_id=TURN_END_ID, pad_token_id=END_OF_TEXT_ID,
        )  # fmt: skip
    if kind == "recurrent":
        types = ["full_attention" if i % 3 == 2 else "linear_attention" for i in range(num_layers)]
        sizes |= {
            "layer_types": types, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        }  # fmt: skip
        return t.Qwen3NextConfig(**sizes)
    raise ValueError(f"no tiny target of kind {kind!r}")


def tiny_model(kind: str = "llama", *, seed: int = 0, dtype: str = "float32", **changes: Any) -> Any:
    """A random model of one kind in evaluation mode, the same for the same arguments."""
    import torch
    import transformers as t

    config = tiny_config(kind, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "nested":
            model = t.Mistral3ForConditionalGeneration(config)
        else:
            model = t.AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():  # norms that are all ones would hide a forgotten or doubled norm
            for name, parameter in model.named_parameters():
                if "norm" in name and parameter.ndim == 1:
                    noise = torch.rand(parameter.shape, generator=generator) - 0.5
                    parameter.add_(noise.to(parameter.dtype))
    return model.to(getattr(torch, dtype)).eval()


def save_tiny_target(
    folder: Path,
    kind: str = "llama",
    seed: int = 0,
    dtype: str = "float32",
    *,
    max_shard_kilobytes: int | None = None,
    **changes: Any,
) -> Path:
    """Write a tiny random target as a model folder: config, safetensors, tokenizer, generation config.

    Args:
        kind: one of `KINDS`; ``llama`` has tied embeddings, the others have not (but ``sliding``).
        max_shard_kilobytes: split the weights into files of about this size, with an index.
        changes: fields of the configuration to set, for example ``num_layers=4``.
    """
    folder = Path(folder)
    model = tiny_model(kind, seed=seed, dtype=dtype, **changes)
    sharding = {} if max_shard_kilobytes is None else {"max_shard_size": f"{max_shard_kilobytes}KB"}
    model.save_pretrained(folder, **sharding)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [TURN_END_ID, END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID})
    )
    return folder
