"""Stock chat templates, written here from what the models' own templates render for messages and tools, each with its special tokens.

They are short forms, not the published files: the text for the conversations of these tests is the same, without dates, default
prompts for tools and images. `first` and `last` are what comes before and after an answer that is trained on, for the last message of a
conversation; `inner` the same for an earlier one.
"""

from __future__ import annotations

from typing import NamedTuple

import tokenizers

from hone.model.tokenizer import Tokenizer


class Stock(NamedTuple):
    """A template, its special tokens (the second is the end of text), and the text around an answer."""

    template: str
    special: tuple[str, ...]
    bos: str = ""
    inner: tuple[str, str] = ("", "")
    last: tuple[str, str] = ("", "")
    system: bool = True


_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CALL = (
    '{% for c in m.tool_calls or [] %}{{ \'\\n<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)
_QWEN25 = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    + _CALL
    + "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set think = '' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set think = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or think) %}{{ '<think>\\n' + think + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ content }}" + _CALL + "{{ '<|im_end|>\\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA2 = (
    "{% set sys = messages[0].content if messages[0].role == 'system' else '' %}{% set rest = messages[1:] if sys else messages %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set text = '<<SYS>>\\n' + sys + '\\n<</SYS>>\\n\\n' + m.content if loop.first and sys else m.content %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_HEADERS = (
    "{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' }}{{ c.arguments | tojson }}{{ '}' }}"
    "{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_LLAMA3 = "{{ bos_token }}" + _HEADERS
_LLAMA31 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n\\n' + (sys or '') + '<|eot_id|>' }}"
    + _HEADERS
)
_GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_GEMMA3 = (
    "{{ bos_token }}{% set before = '' %}{% if messages[0].role == 'system' %}{% set before = messages[0].content + '\\n\\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (before if loop.first else '') }}"
    "{{ m.content | trim }}{{ '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% set sys = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if sys else messages) %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (sys if loop.last else '') + m.content + '[/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
_PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_GLM = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\\n<think></think>\\n' + m.content.strip() }}"
    "{% else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_IM, _EOT = ("", "<|im_end|>"), ("", "<|eot_id|>")
_TURN = ("", "<end_of_turn>")
_TEXT, _IM_TOKENS = "<|endoftext|>", ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_L3 = ("<|end_of_text|>", "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
_G = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
_GLM_TOKENS = ("[gMASK]", _TEXT, "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_OSS = ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")
_THINK = "\n<think></think>\n"
_FINAL = "<|channel|>final<|message|>"
STOCK = {
    "llama2": Stock(_LLAMA2, ("<unk>", "</s>", "<s>"), "<s>", (" ", " </s>"), (" ", " </s>")),
    "llama3": Stock(_LLAMA3, _L3, "<|begin_of_text|>", _EOT, _EOT),
    "llama3.1": Stock(_LLAMA31, _L3, "<|begin_of_text|>", _EOT, _EOT),
    "qwen2.5": Stock(_QWEN25, _IM_TOKENS, "", _IM, _IM),
    "qwen3": Stock(_QWEN3, _IM_TOKENS, "", _IM, ("<think>\n\n</think>\n\n", "<|im_end|>")),
    "gemma2": Stock(_GEMMA2, _G, "<bos>", _TURN, _TURN, system=False),
    "gemma3": Stock(_GEMMA3, _G, "<bos>", _TURN, _TURN),
    "mistral": Stock(_MISTRAL, ("<unk>", "</s>", "<s>", "[INST]", "[/INST]"), "<s>", (" ", "</s>"), (" ", "</s>")),
    "phi3": Stock(
        _PHI3, ("<unk>", _TEXT, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "",
        ("", "<|end|>"), ("", f"<|end|>\n{_TEXT}"),
    ),
    "glm": Stock(_GLM, _GLM_TOKENS, "", (_THINK, "<|user|>"), (_THINK, _TEXT)),
    "gpt-oss": Stock(_GPT_OSS, _OSS, "", (_FINAL, "<|end|>"), (_FINAL, "<|return|>")),
    "chatml": Stock(_CHATML, _IM_TOKENS, "", _IM, _IM),
}  # fmt: skip


def tokenizer_of(stock: Stock) -> Tokenizer:
    """A byte-level BPE with a few merges (blanks, line ends, words) and the template's special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "t"), ("Ġt", "h"), (".", "Ċ"), ("<", "|"), ("S", "i"), ("Si", "x"), ("Ġ", "Ġ")]
    vocab = {text: number for number, text in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(list(stock.special))
    tokens = {"eos_token": stock.special[1], **({"bos_token": stock.bos} if stock.bos else {})}
    eos, bos = core.token_to_id(stock.special[1]), core.token_to_id(stock.bos) if stock.bos else None
    return Tokenizer(core, bos_id=bos, eos_ids=(eos,), chat_template=stock.template, template_tokens=tokens)
