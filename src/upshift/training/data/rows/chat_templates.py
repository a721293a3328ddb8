"""List the chat templates that have a name: what ``--chat-template NAME`` writes, as Axolotl writes it under the same name.

They write texts alone. A template that a tokenizer brings may also write tools and thoughts.
"""

from __future__ import annotations

from collections.abc import Mapping

CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
GEMMA = (
    "{{- bos_token }}{%- for message in messages %}{%- if message['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{- raise_exception('turns must be those of the user and the assistant in turn, without a system message') }}{%- endif %}"
    "{%- set role = ['user', 'model'][loop.index0 % 2] %}"
    "{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"
)
PHI_35 = (
    "{%- for message in messages %}{%- if message['role'] in ('user', 'assistant') or message['content'] %}"
    "{{- '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
)
CHAT_TEMPLATES: Mapping[str, str] = {"chatml": CHATML, "gemma": GEMMA, "llama3": LLAMA3, "phi_35": PHI_35}
