"""List templates of LLaMA-Factory 0.9.5 by their names (llamafactory/data/template.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from upshift.training.data.rows.turn_templates import BOS, CONTENT, EOS, THOUGHTS, TurnTemplate

_CHATML_USER = ("<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",)
_CHATML_ASSISTANT = ("{content}<|im_end|>\n",)
_CHATML_SYSTEM = ("<|im_start|>system\n{content}<|im_end|>\n",)


def _chatml(
    default_system: str = "", *, eos_token: str | None = None, thoughts: tuple[str, str] | None = None, starts: bool = False
) -> TurnTemplate:
    return TurnTemplate(
        user=_CHATML_USER,
        assistant=_CHATML_ASSISTANT,
        system=_CHATML_SYSTEM,
        prefix=(BOS,) if starts else (),
        default_system=default_system,
        eos_token=eos_token,
        thoughts=thoughts,
    )


_IM_END = "<|im_end|>"
_GEMMA = TurnTemplate(
    user=("<start_of_turn>user\n{content}<end_of_turn>\n<start_of_turn>model\n",),
    assistant=("{content}<end_of_turn>\n",),
    system=("{content}\n\n",),
    prefix=(BOS,),
)
_PHI_ROLES = TurnTemplate(
    user=("<|user|>\n{content}<|end|>\n<|assistant|>\n",),
    assistant=("{content}<|end|>\n",),
    system=("<|system|>\n{content}<|end|>\n",),
)
_GRANITE = TurnTemplate(
    user=("<|start_of_role|>user<|end_of_role|>{content}<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",),
    assistant=("{content}<|end_of_text|>\n",),
    system=("<|start_of_role|>system<|end_of_role|>{content}<|end_of_text|>\n",),
)
_LLAMA2_SYSTEM = ("<<SYS>>\n{content}\n<</SYS>>\n\n",)

TEMPLATES: Mapping[str, TurnTemplate] = {
    "alpaca": TurnTemplate(
        user=("### Instruction:\n{content}\n\n### Response:\n",),
        assistant=(CONTENT, EOS, "\n\n"),
        default_system=(
            "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        ),
    ),
    "breeze": TurnTemplate(user=("[INST] {content} [/INST] ",), assistant=(CONTENT,), prefix=(BOS,), closes_chat=True),
    "chatml": _chatml(eos_token=_IM_END),
    "cohere": TurnTemplate(
        user=("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{content}<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",),
        system=("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{content}<|END_OF_TURN_TOKEN|>",),
        prefix=(BOS,),
    ),
    "deepseek": TurnTemplate(user=("User: {content}\n\nAssistant:",), system=("{content}\n\n",), prefix=(BOS,)),
    "deepseek3": TurnTemplate(user=("<｜User｜>{content}<｜Assistant｜>",), prefix=(BOS,)),
    "deepseekr1": TurnTemplate(user=("<｜User｜>{content}<｜Assistant｜>",), prefix=(BOS,), thoughts=THOUGHTS),
    "default": TurnTemplate(
        user=("Human: {content}", EOS, "\nAssistant:"), assistant=(CONTENT, EOS, "\n"), system=("System: {content}", EOS, "\n")
    ),
    "empty": TurnTemplate(user=(CONTENT,), assistant=(CONTENT,)),
    "exaone": TurnTemplate(
        user=("[|user|]{content}\n[|assistant|]",), assistant=(CONTENT, EOS, "\n"), system=("[|system|]{content}[|endofturn|]\n",)
    ),
    "falcon": TurnTemplate(user=("User: {content}\nFalcon:",), assistant=("{content}\n",), closes_chat=True),
    "falcon_h1": _chatml(starts=True),
    "fewshot": TurnTemplate(user=(CONTENT,), assistant=("{content}\n\n",), closes_chat=True),
    "gemma": replace(_GEMMA, eos_token="<end_of_turn>", joins_system=True),
    "gemma2": replace(_GEMMA, closes_chat=True, joins_system=True),
    "gemma3": replace(_GEMMA, eos_token="<end_of_turn>", joins_system=True),
    "glm4": TurnTemplate(
        user=("<|user|>\n{content}<|assistant|>",),
        assistant=("\n{content}",),
        system=("<|system|>\n{content}",),
        prefix=("[gMASK]<sop>",),
        closes_chat=True,
    ),
    "granite3": _GRANITE,
    "granite4": replace(_GRANITE, default_system="You are Granite, developed by IBM. You are a helpful AI assistant."),
    "lfm2": _chatml("You are a helpful AI assistant.", eos_token=_IM_END),
    "llama2": TurnTemplate(user=(BOS, "[INST] {content} [/INST]"), system=_LLAMA2_SYSTEM, joins_system=True),
    "llama3": TurnTemplate(
        user=(
            "<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        assistant=("{content}<|eot_id|>",),
        system=("<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",),
        prefix=(BOS,),
        eos_token="<|eot_id|>",
    ),
    "mimo": _chatml("You are a helpful assistant.", eos_token=_IM_END, thoughts=THOUGHTS),
    "ministral": TurnTemplate(user=("[INST]{content}[/INST]",), system=("{content}\n\n",), prefix=(BOS,), joins_system=True),
    "mistral": TurnTemplate(
        user=("[INST] {content}[/INST]",),
        assistant=(" {content}", EOS),
        system=("{content}\n\n",),
        prefix=(BOS,),
        joins_system=True,
    ),
    "mistral_small": TurnTemplate(
        user=("[INST]{content}[/INST]",), system=("[SYSTEM_PROMPT]{content}[/SYSTEM_PROMPT]",), prefix=(BOS,)
    ),
    "olmo": TurnTemplate(user=("<|user|>\n{content}<|assistant|>\n",), prefix=(EOS,)),
    "openchat": TurnTemplate(user=("GPT4 Correct User: {content}", EOS, "GPT4 Correct Assistant:"), prefix=(BOS,)),
    "phi": replace(_PHI_ROLES, eos_token="<|end|>"),
    "phi4": TurnTemplate(
        user=("<|im_start|>user<|im_sep|>{content}<|im_end|><|im_start|>assistant<|im_sep|>",),
        assistant=("{content}<|im_end|>",),
        system=("<|im_start|>system<|im_sep|>{content}<|im_end|>",),
        eos_token=_IM_END,
    ),
    "phi4_mini": TurnTemplate(
        user=("<|user|>{content}<|end|><|assistant|>",),
        assistant=("{content}<|end|>",),
        system=("<|system|>{content}<|end|>",),
        eos_token="<|end|>",
    ),
    "qwen": _chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", eos_token=_IM_END),
    "qwen3": _chatml(eos_token=_IM_END, thoughts=THOUGHTS),
    "qwen3_nothink": _chatml(eos_token=_IM_END),
    "sailor": TurnTemplate(
        user=("<|im_start|>question\n{content}<|im_end|>\n<|im_start|>answer\n",),
        assistant=_CHATML_ASSISTANT,
        system=_CHATML_SYSTEM,
        default_system=(
            "You are an AI assistant named Sailor created by Sea AI Lab. Your answer should be friendly, unbiased, faithful, "
            "informative and detailed."
        ),
    ),
    "seed_oss": TurnTemplate(
        user=(BOS, "user\n{content}", EOS, BOS, "assistant\n"),
        system=(BOS, "system\n{content}", EOS),
        thoughts=("<seed:think>", "</seed:think>"),
    ),
    "smollm": _chatml(),
    "smollm2": _chatml("You are a helpful AI assistant named SmolLM, trained by Hugging Face."),
    "solar": TurnTemplate(
        user=("### User:\n{content}\n\n### Assistant:\n",),
        assistant=(CONTENT,),
        system=("### System:\n{content}\n\n",),
        closes_chat=True,
    ),
    "starchat": TurnTemplate(
        user=("<|user|>\n{content}<|end|>\n<|assistant|>",),
        assistant=("{content}<|end|>\n",),
        system=("<|system|>\n{content}<|end|>\n",),
    ),
    "vicuna": TurnTemplate(
        user=("USER: {content} ASSISTANT:",),
        default_system=(
            "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and "
            "polite answers to the user's questions."
        ),
    ),
    "yi": _chatml(),
    "zephyr": TurnTemplate(
        user=("<|user|>\n{content}", EOS, "<|assistant|>\n"),
        system=("<|system|>\n{content}", EOS),
        default_system="You are Zephyr, a helpful assistant.",
    ),
}
