"""Tokenizers with chat templates, and conversations made for them."""

import importlib.util
import json
from pathlib import Path

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

# As the families publish them, from packages that carry them; Mistral's for
# tools changes what it says of them by the conversation.
TEMPLATES = {
    "llama3": "trl/chat_templates/llama3.jinja",
    "llama3_1": "trl/chat_templates/llama3_1.jinja",
    "llama3_training": "trl/chat_templates/llama3_training.jinja",
    "qwen2_5": "trl/chat_templates/qwen2_5.jinja",
    "qwen2_5_training": "trl/chat_templates/qwen2_5_training.jinja",
    "qwen3": "trl/chat_templates/qwen3.jinja",
    "qwen3_training": "trl/chat_templates/qwen3_training.jinja",
    "gemma": "trl/chat_templates/gemma.jinja",
    "gemma3": "trl/chat_templates/gemma3.jinja",
    "gemma3_training": "trl/chat_templates/gemma3_training.jinja",
    "mistral_v1": "axolotl/utils/chat_templates/templates/mistral_v1.jinja",
    "mistral_v3": "axolotl/utils/chat_templates/templates/mistral_v3_tekken.jinja",
    "mistral_v7": "axolotl/utils/chat_templates/templates/mistral_v7_tekken.jinja",
}
SPECIAL = [
    "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>",
    "</think>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather \u00fc <b>",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "which"},
                "days": {"type": "number", "enum": [1, 2.5, 1e20]},
            },
            "required": ["city"],
        },
    },
}
CONTENTS = [
    "hello", "  spaces around \n", "Gr\u00fc\u00dfe, \u4e16\u754c \U0001f30d",
    "\u3000wide\u00a0", "", "\n", "<think>\nhm\n</think>\n\nyes", "a\tb\r\nc",
    "e\u0301 \u2028 {{ x }} {% if %}", "and \"quotes\" 'too'",
]


def template(name):
    package, _, rest = TEMPLATES[name].partition("/")
    # Found, not imported: what these packages need is not there.
    folder = Path(importlib.util.find_spec(package).origin).parent
    return (folder / rest).read_text()


def conversations(count=50):
    """Messages and tools: with a system's message or not, of one to three
    turns, with tool calls, with reasoning."""
    made = []
    for i in range(count):
        messages = []
        if i % 3 == 0:
            messages.append({"role": "system", "content": CONTENTS[i % 10]})
        for turn in range(1 + i % 4 % 3):
            messages.append(
                {"role": "user", "content": CONTENTS[(i + turn) % 10]})
            answer = {"role": "assistant",
                      "content": CONTENTS[(i * 3 + turn) % 10]}
            if i % 5 == 1:
                answer["reasoning_content"] = "Let me think\u2026\n"
            if i % 4 == 2 and turn == 0:
                call = {"name": "weather", "arguments": {
                    "city": "K\u00f6ln\u2028\"", "days": [1, 2.0, None, True]}}
                answer["tool_calls"] = [
                    {"type": "function", "id": "abcdefghi", "function": call}]
                messages += [answer, {
                    "role": "tool", "name": "weather",
                    "tool_call_id": "abcdefghi", "content": "rain"}]
                answer = {"role": "assistant", "content": "it rains"}
            messages.append(answer)
        made.append({"messages": messages, "tools": [TOOL] if i % 4 == 2 else None})
    return made


def make_tokenizer(chat_template):
    """Byte-level BPE, so small that every test can have one."""
    peer = tokenizers.Tokenizer(models.BPE())
    peer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    peer.decoder = decoders.ByteLevel()
    text = [json.dumps(c, ensure_ascii=False) for c in conversations()]
    peer.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=peer, bos_token="<s>", eos_token="</s>")
    made.chat_template = chat_template
    return made
