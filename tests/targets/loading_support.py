"""Tiny models on disk: a Llama as a GGUF file and as a model folder."""

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = [*SPECIAL, *BYTES, "ĠĠ"]  # 260 tokens
LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 2, 32, 4, 2, 64
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_gguf(
    path: Path, metadata: dict[str, object] | None = None, change: dict[str, tuple[int, ...] | None] | None = None
) -> None:
    """A random Llama in Q4_1 and float32, with a byte-level tokenizer of SmolLM's kind.

    `metadata` (strings, floats, ids; None: leave out) and `change` (shapes of Q4_1 or one-dimensional float32
    tensors) go over what such a file has.
    """
    stated = {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.eos_token_id": 2} | (metadata or {})
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(VOCAB))
    writer.add_tokenizer_model("gpt2")
    for key, value in stated.items():
        if value is not None:
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(key, value)
    writer.add_token_list(VOCAB)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(VOCAB) - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (len(VOCAB), HIDDEN)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (kv, HIDDEN),
            f"blk.{i}.attn_v": (kv, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate": (INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_up": (INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, INTERMEDIATE),
        }
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, shape in (shapes | (change or {})).items():
        if shape is None:
            continue
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, dtype=np.float32))
            continue
        values = random.standard_normal(shape, dtype=np.float32) * 0.2
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ["output_norm", *(f"blk.{i}.{part}_norm" for i in range(LAYERS) for part in ("attn", "ffn"))]:
        writer.add_tensor(f"{name}.weight", 1 + random.standard_normal(HIDDEN, dtype=np.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_config(**changes: object) -> LlamaConfig:
    sizes = {
        "vocab_size": len(VOCAB),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**(sizes | changes))


def write_tokenizer(folder: Path) -> None:
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(VOCAB)}, [("Ġ", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[2]).save_pretrained(folder)


def write_llama(folder: Path, shards: str = "5GB") -> LlamaForCausalLM:
    """Save a random Llama with untied head and a tokenizer."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(tiny_config()).eval()
    model.save_pretrained(folder, max_shard_size=shards)
    write_tokenizer(folder)
    return model


def write_chat_llama(folder: Path) -> Path:
    """The model folder of `write_llama`, with a chat template that names the roles; the folder."""
    write_llama(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
