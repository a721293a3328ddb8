"""List the chat templates that have a name: what ``--chat-template NAME`` writes, as Axolotl writes it under the same name.

They write texts alone. A template that a tokenizer brings may also write tools and thoughts. A turn that a template does not
write, such as one of a tool, makes the row one that is rejected. Axolotl's templates that write the date of the day are left out.
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
    "{%- for message in messages %}"
    "{%- if message['role'] in ('user', 'assistant') or (message['role'] == 'system' and message['content']) %}"
    "{{- '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
)
# The first message, if it is the system's, and the others. Some templates want turns of the user and the assistant alternately.
SPLIT_SYSTEM = (
    "{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else none %}"
    "{%- set turns = messages if system is none else messages[1:] %}"
)
CHECK_TURNS = (
    "{%- for message in turns %}{%- if message['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{- raise_exception('after a system message, turns must be those of the user and the assistant in turn') }}"
    "{%- endif %}{%- endfor %}"
)
CHATML_TURN = "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
CHATML_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
ALPACA = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message['role'] == 'system' and loop.first %}{{- message['content'] }}"
    "{%- elif message['role'] == 'user' %}{{- '### Instruction:\n' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}{{- '### Response:\n' + message['content'] + eos_token }}{%- endif %}"
    "{%- if not loop.last %}{{- '\n\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '\n\n### Response:\n' }}{%- endif %}"
)
COHERE = (
    f"{{{{- bos_token }}}}{SPLIT_SYSTEM}{CHECK_TURNS}"
    "{%- if system is not none %}{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system + '<|END_OF_TURN_TOKEN|>' }}{%- endif %}"
    "{%- for message in turns %}{%- set speaker = ['USER', 'CHATBOT'][loop.index0 % 2] %}"
    "{{- '<|START_OF_TURN_TOKEN|><|' + speaker + '_TOKEN|>' + message['content'] | trim + '<|END_OF_TURN_TOKEN|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"
)
DEEPSEEK_V2 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}{{- '<｜Assistant｜>' + message['content'] + eos_token }}"
    "{%- elif message['role'] == 'system' %}{{- message['content'] + '\n\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"
)
DEEPSEEK_V3 = (  # thoughts are not written, and all messages of the system come first
    "{{- bos_token }}"
    "{{- messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\n\n') }}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}"
    "{{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"
)
EXAONE = (
    "{%- if messages[0]['role'] != 'system' %}{{- '[|system|][|endofturn|]\n' }}{%- endif %}"
    "{%- for message in messages %}{%- set end = '\n' if message['role'] == 'user' else '[|endofturn|]\n' %}"
    "{{- '[|' + message['role'] + '|]' + message['content'] + end }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '[|assistant|]' }}{%- endif %}"
)
FALCON_H1 = (
    "{{- bos_token }}{%- for message in messages %}{%- if message['role'] != 'system' or loop.first %}"
    f"{CHATML_TURN}{{%- endif %}}{{%- endfor %}}{CHATML_PROMPT}"
)
GEMMA3 = (
    f"{{{{- bos_token }}}}{SPLIT_SYSTEM}{CHECK_TURNS}{{%- for message in turns %}}"
    "{{- '<start_of_turn>' + ['user', 'model'][loop.index0 % 2] + '\n' }}"
    "{%- if loop.first and system is not none %}{{- system + '\n\n' }}{%- endif %}"
    "{{- message['content'] | trim + '<end_of_turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"
)
LLAMA4 = (
    f"{{{{- bos_token }}}}{SPLIT_SYSTEM}"
    "{%- if system is not none %}{{- '<|header_start|>system<|header_end|>\n\n' + system | trim + '<|eot|>' }}{%- endif %}"
    "{%- for message in turns %}{%- if message['role'] not in ('tool', 'ipython') %}"
    "{{- '<|header_start|>' + message['role'] + '<|header_end|>\n\n' + message['content'] + '<|eot|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\n\n' }}{%- endif %}"
)
MISTRAL_V1 = (
    f"{{{{- bos_token }}}}{SPLIT_SYSTEM}{CHECK_TURNS}{{%- for message in turns %}}{{%- if message['role'] == 'user' %}}"
    "{{- ' [INST] ' }}{%- if loop.first and system is not none %}{{- system + '\n\n' }}{%- endif %}"
    "{{- message['content'] + ' [/INST]' }}{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
# The system message is written if the chat ends with the user's turn, and so never in a chat that is learned.
MISTRAL_V2V3 = (
    f"{{{{- bos_token }}}}{SPLIT_SYSTEM}{CHECK_TURNS}{{%- for message in turns %}}{{%- if message['role'] == 'user' %}}"
    "{{- '[INST] ' }}{%- if loop.last and system is not none %}{{- system + '\n\n' }}{%- endif %}"
    "{{- message['content'] + '[/INST]' }}{%- else %}{{- ' ' + message['content'] | trim + eos_token }}{%- endif %}{%- endfor %}"
)
MISTRAL_V3_TEKKEN = (
    f"{{{{- bos_token }}}}{SPLIT_SYSTEM}{CHECK_TURNS}{{%- for message in turns %}}{{%- if message['role'] == 'user' %}}"
    "{{- '[INST]' }}{%- if loop.last and system is not none %}{{- system + '\n\n' }}{%- endif %}"
    "{{- message['content'] + '[/INST]' }}{%- else %}{{- message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
NEMOTRON_H = (
    "{%- for message in messages %}"
    "{%- if message['role'] not in ('user', 'assistant') and not (loop.first and message['role'] == 'system') %}"
    "{{- raise_exception('turns must be those of the user and the assistant, after a system message') }}{%- endif %}"
    f"{CHATML_TURN}{{%- endfor %}}{CHATML_PROMPT}"
)
PHI_3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}{{- message['content'] + '<|end|>\n' }}"
    "{%- elif message['role'] in ('system', 'user') %}"
    "{{- '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{%- if message['role'] == 'user' %}{{- '<|assistant|>\n' }}{%- endif %}{%- endif %}{%- endfor %}"
)
QWEN_25 = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message['role'] in ('system', 'user', 'assistant') %}"
    f"{CHATML_TURN}{{%- endif %}}{{%- endfor %}}{CHATML_PROMPT}"
)
QWEN2_VL = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- endif %}"
    f"{{%- for message in messages %}}{CHATML_TURN}{{%- endfor %}}{CHATML_PROMPT}"
)
CHAT_TEMPLATES: Mapping[str, str] = {
    "alpaca": ALPACA,
    "aya": COHERE,
    "chatml": CHATML,
    "cohere": COHERE,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "exaone": EXAONE,
    "falcon_h1": FALCON_H1,
    "gemma": GEMMA,
    "gemma3": GEMMA3,
    "gemma3n": GEMMA3,
    "llama3": LLAMA3,
    "llama4": LLAMA4,
    "mistral_v1": MISTRAL_V1,
    "mistral_v2v3": MISTRAL_V2V3,
    "mistral_v3_tekken": MISTRAL_V3_TEKKEN,
    "nemotron_h": NEMOTRON_H,
    "phi_3": PHI_3,
    "phi_35": PHI_35,
    "pixtral": MISTRAL_V3_TEKKEN,
    "qwen2_vl": QWEN2_VL,
    "qwen_25": QWEN_25,
}
