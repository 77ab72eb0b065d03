"""A random Llama with a byte-level BPE tokenizer of its own, as a Hugging Face folder."""

import tokenizers
import torch
import transformers

TEXT = "".join(
    f"In the year {year} the river rose {year % 7} feet, \u00fcber \u4e2d.\n"
    for year in range(1800, 1860))
PROMPT = "In the year 1812 the river"


def save(path):
    """Writes the folder; ids 300 .. 319 of the model have no text."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, show_progress=False,
                                  special_tokens=["<|endoftext|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=320, hidden_size=48, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
        initializer_range=0.2))
    model.save_pretrained(path)
    return path, model.eval(), tokenizer
