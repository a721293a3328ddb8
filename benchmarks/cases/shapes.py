"""Model shapes for the cases: configs written to a folder, random weights. None has the sizes of a published model."""

from __future__ import annotations

from pathlib import Path

from transformers import BertConfig, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config, T5Config

TINY = LlamaConfig(  # the trainer case's quick model: traced once for all cases
    vocab_size=4096, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=3,
    num_key_value_heads=3, max_position_embeddings=1024, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    bos_token_id=0, eos_token_id=0, pad_token_id=4095,
)  # fmt: skip
SHAPES: dict[str, PretrainedConfig] = {
    "llama-10m": LlamaConfig(
        vocab_size=4096, hidden_size=320, intermediate_size=864, num_hidden_layers=6, num_attention_heads=5,
        num_key_value_heads=5, max_position_embeddings=1024, architectures=["LlamaForCausalLM"],
    ),
    "llama-27m-gqa": LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1376, num_hidden_layers=7, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=1024, architectures=["LlamaForCausalLM"],
    ),
    "qwen2-23m-tied": Qwen2Config(
        vocab_size=8000, hidden_size=448, intermediate_size=1216, num_hidden_layers=8, num_attention_heads=7,
        num_key_value_heads=7, tie_word_embeddings=True, max_position_embeddings=1024,
        architectures=["Qwen2ForCausalLM"],
    ),
    "gpt2-13m": GPT2Config(
        vocab_size=6000, n_embd=384, n_layer=6, n_head=6, n_positions=1024, bos_token_id=0, eos_token_id=0,
        architectures=["GPT2LMHeadModel"],
    ),
    "bert-10m": BertConfig(
        vocab_size=8000, hidden_size=320, intermediate_size=1280, num_hidden_layers=6, num_attention_heads=5,
        architectures=["BertForMaskedLM"],
    ),
    "t5-9m": T5Config(
        vocab_size=6000, d_model=320, d_ff=1024, d_kv=64, num_layers=3, num_heads=5, decoder_start_token_id=0, pad_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    ),
}  # fmt: skip


def write_config(config: PretrainedConfig, folder: Path) -> str:
    """The folder, as a model reference."""
    config.save_pretrained(folder)
    return str(folder)
