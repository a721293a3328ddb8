"""Name our option for one that a user remembers from another library, and say which of them are not needed.

The names are those of transformers' TrainingArguments, TRL, accelerate, PEFT, Axolotl, LLaMA-Factory, vLLM and llama.cpp, and
common short forms. They have underscores here, and no dashes before them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from upshift.inference.generation.options import GenerationOptions
from upshift.planning.search.space import settable_fields

OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")
PLAN_SET = "FIELD=VALUE"  # the metavar of --set where it fixes fields of the plan
GENERATION_SET = "NAME=VALUE"  # the same where it sets options of generation

# What to write instead. The first line whose options the command has counts.
_WORDS: Mapping[str, str] = {
    "--global-batch N": "batch_size batch train_batch_size per_device_batch_size global_batch_size effective_batch_size bs",
    "--set per_device_train_batch_size=N": "micro_batch_size micro_batch mbs device_train_microbatch_size",
    "--set gradient_accumulation_steps=N": "grad_accum grad_accum_steps accumulation_steps gradient_accumulation gas",
    "--max-new-tokens N": "max_tokens max_length max_len max_gen_len n_predict num_predict max_output_tokens",
    "--generate --output-length N": "max_new_tokens max_tokens n_predict",
    "--engine vllm --engine-set max_model_len=N": "max_model_len ctx_size context_length max_context_length max_seq_len n_ctx",
    "--sequence-length N": "max_length max_len max_seq_length max_seq_len max_sequence_length sequence_len seq_length seq_len "
    "cutoff_len block_size model_max_length max_model_len context_length ctx_size n_ctx max_context_length max_tokens",
    "--learning-rate X": "lr learning_rates base_lr max_lr",
    "--lr-scheduler-type NAME": "scheduler lr_scheduler scheduler_type lr_schedule lr_decay_style",
    "--warmup-steps N": "warmup num_warmup_steps lr_warmup_steps warmup_iters",
    "--warmup-ratio X": "warmup_proportion lr_warmup_ratio",
    "--weight-decay X": "wd",
    "--max-grad-norm X": "grad_clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping max_norm",
    "--epochs N": "epoch num_epochs num_epoch n_epochs num_train_epochs max_epochs",
    "--max-steps N": "num_steps n_steps iters train_steps max_train_steps num_train_steps total_steps max_iters",
    "--steps N": "max_steps num_steps n_steps train_steps max_train_steps num_train_steps total_steps",
    "--seed N": "random_seed data_seed manual_seed random_state",
    "--set precision=bf16": "bf16 bfloat16 use_bf16 bf16_full_eval",
    "--set precision=fp16": "fp16 half float16 use_fp16",
    "--set precision=fp32": "fp32 float32 full_precision",
    "--set precision=tf32": "tf32",
    "--set precision=NAME": "dtype torch_dtype mixed_precision amp precision_type compute_dtype",
    "--set optim=NAME": "optimizer optimizer_type optimizer_name",
    "--set attention=NAME": "attn_implementation flash_attention flash_attn use_flash_attention use_flash_attention_2 "
    "flash_attention_2 attn sdp_attention",
    "--set activation_checkpointing=LAYERS": "gradient_checkpointing use_gradient_checkpointing activation_recompute",
    "--set torch_compile=NAME": "compile use_compile torch_compile_mode",
    "--set fused_kernels=true": "use_liger use_liger_kernel enable_liger_kernel liger_kernel",
    "--set packing=true": "pack sample_packing neat_packing",
    "--lora-rank 16 --load-in-4bit": "qlora use_qlora",
    "--lora-rank 16": "lora use_lora peft use_peft finetuning_type lora_r peft_lora_r lora_dim rank r adapter",
    "--lora-alpha X": "peft_lora_alpha alpha",
    "--lora-target NAME,NAME": "target_modules lora_target_modules lora_target_linear lora_modules",
    "--lora-modules-to-save NAME,NAME": "modules_to_save additional_target",
    "--lora-dora": "dora use_dora",
    "--lora-rslora": "rslora use_rslora",
    "--load-in-4bit": "load_4bit use_4bit quantization_bit quantization bits quantize bnb_4bit load_in_8bit bnb int4 nf4",
    "--quality X": "quantization dtype load_in_4bit load_in_8bit load_4bit fp16 bf16 int8 int4 precision torch_dtype half "
    "kv_cache_dtype",
    "--on NAME": "gpu gpus device devices machine hardware host cuda accelerator gpu_type target num_gpus n_gpu",
    "--nproc N": "num_gpus n_gpu ngpu ngpus gpus nproc_per_node num_processes world_size num_proc gpus_per_node",
    "--nodes N": "num_nodes nnodes num_machines",
    "--tensor-parallel N": "tp tp_size tensor_parallel_size tensor_model_parallel_size",
    "--pipeline-parallel N": "pp pp_size pipeline_parallel_size pipeline_model_parallel_size",
    "--context-parallel N": "cp cp_size context_parallel_size sequence_parallel_size",
    "--expert-parallel N": "ep ep_size expert_parallel_size enable_expert_parallel",
    "--fully-shard NAME": "fsdp use_fsdp deepspeed use_deepspeed zero zero_stage fsdp_config dp_shard_size",
    "--replicas N": "data_parallel_size dp dp_size data_parallel num_workers workers",
    "--generate": "inference infer generation predict serve decode",
    "--encode": "embed embedding embeddings encoding",
    "--data PATH": "dataset dataset_name datasets dataset_path data_path data_files train_file train_data train_dataset file "
    "train_path dataset_dir input",
    "--prompts FILE": "dataset data input input_file prompt_file file prompts_file",
    "--input FILE": "data dataset input_file file texts prompts",
    "--eval-data PATH": "eval_dataset eval_file validation_file validation_data val_file val_data val_dataset test_file",
    "--eval-size X": "val_size val_set_size test_size validation_split validation_split_percentage test_split_ratio",
    "--text-column NAME": "dataset_text_field text_field column text_key content_field",
    "--chat-template NAME": "template",
    "--loss-on NAME": "train_on_inputs mask_prompt completion_only_loss assistant_only_loss train_on_responses_only "
    "train_on_prompt mask_history",
    "--split train[:N]": "max_samples max_train_samples num_samples",
    "--objective NAME": "task task_type rl stage trainer training_type",
    "--dpo-beta X": "beta pref_beta rl_beta",
    "--dpo-loss NAME": "loss_type pref_loss",
    "--output FOLDER": "output_dir out out_dir output_path save_dir save_path output_folder save_to",
    "--output FILE": "output_file out output_path save_path outfile",
    "--overwrite": "overwrite_output_dir force",
    "--resume": "resume_from_checkpoint resume_from auto_resume_from_checkpoints resume_checkpoint checkpoint continue",
    "--logging-steps N": "log_every log_interval logging_interval log_steps logging_strategy log_every_n_steps",
    "--eval-steps N": "eval_strategy evaluation_strategy eval_every eval_interval val_check_interval do_eval evals_per_epoch",
    "--save-steps N": "save_strategy save_every save_interval checkpoint_every checkpointing_steps saves_per_epoch",
    "--save-total-limit N": "max_checkpoints keep_last_n",
    "--load-best": "load_best_model_at_end save_best",
    "--early-stopping-patience N": "early_stopping patience",
    "--neftune-noise-alpha X": "neftune noisy_embedding_alpha",
    "--report-to wandb": "wandb use_wandb wandb_project wandb_mode",
    "--report-to tensorboard": "tensorboard use_tensorboard logging_dir",
    "--report-to NAME": "logger log_with tracker trackers",
    "--config FILE": "config_file yaml cfg",
    "--concurrency N": "max_num_seqs max_batch_size parallel max_concurrent_requests num_parallel batch_size",
    "--total-memory GIB": "gpu_memory_utilization mem_fraction_static max_memory",
    "--max-memory DEVICE=SIZE": "gpu_memory_utilization device_map",
    "--api-key-file PATH": "api_key api_keys",
    "--adapter NAME=FOLDER": "lora lora_modules enable_lora lora_path peft adapter_path",
    "--draft MODEL": "assistant_model speculative_model speculative_config draft_model model_draft",
    "--set temperature=X": "temp",
    "--set repetition_penalty=X": "repeat_penalty",
    "--space FILE": "lr learning_rate weight_decay wd warmup warmup_steps warmup_ratio lr_scheduler_type scheduler max_grad_norm",
}

# Options that a command does not have because nothing needs them, and why.
_REMARKS: Mapping[str, str] = {
    "write the model as the first word, without an option": "model model_name model_name_or_path model_id model_path base_model "
    "pretrained_model_name_or_path pretrained m checkpoint_path",
    "choose the GPUs with CUDA_VISIBLE_DEVICES, which is empty for the CPU": "device devices gpu gpus gpu_id gpu_ids cuda "
    "use_cuda use_gpu cpu use_cpu no_cuda device_map device_id accelerator n_gpu_layers num_gpus",
    "Upshift chooses the batch": "batch_size batch per_device_eval_batch_size eval_batch_size bs auto_find_batch_size "
    "max_num_batched_tokens micro_batch_size group_by_length",
    "code from a model's files is never run; leave it out": "trust_remote_code",
    "it is not needed here; leave it out": "dataloader_num_workers num_workers preprocessing_num_workers dataset_num_proc "
    "local_rank do_train do_predict remove_unused_columns low_cpu_mem_usage use_fast_tokenizer ddp_find_unused_parameters "
    "pin_memory dataloader_pin_memory disable_tqdm ddp_timeout prediction_loss_only use_cache verbose",
    "push the output folder after the run, with hf upload NAME FOLDER": "push_to_hub hub_model_id hub_token push_dataset_to_hub",
    "log in once with hf auth login": "token hf_token use_auth_token hf_hub_token hf_use_auth_token",
}


def _by_name(table: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    names = {name for listed in table.values() for name in listed.split()}
    return {name: tuple(words for words, listed in table.items() if name in listed.split()) for name in names}


WORDS_OF = _by_name(_WORDS)
REMARK_OF = _by_name(_REMARKS)


def foreign_hint(option: str, metavars: Mapping[str, str]) -> str:
    """Return ``; did you mean WORDS?`` or another remark on an option of another library, or an empty text.

    ``metavars``: what each option of the command takes, by the option's name; an empty text for a flag."""
    name = _plain_name(option)
    words = next((words for words in WORDS_OF.get(name, ()) if can_be_written(words, metavars)), None)
    if words is None and (field := can_be_set(name, metavars)):
        words = f"--set {field}=VALUE"
    if words is not None:
        return f"; did you mean {words}?"
    return "".join(f"; {remark}" for remark in REMARK_OF.get(name, ())[:1])


def is_foreign(option: str) -> bool:
    """Return whether another library has this option, or a command of ours sets it with --set."""
    name = _plain_name(option)
    return name in WORDS_OF or name in REMARK_OF or name in settable_fields() or name in GenerationOptions.model_fields


def _plain_name(option: str) -> str:
    return "_".join(re.findall("[a-z0-9]+", option.lower()))


def can_be_written(words: str, metavars: Mapping[str, str]) -> bool:
    """Return whether a command has all options of the words, and what --set sets in them."""
    field = re.search(r"--set (\w+)=", words)
    return all(option in metavars for option in OPTION.findall(words)) and (field is None or bool(can_be_set(field[1], metavars)))


def can_be_set(field: str, metavars: Mapping[str, str]) -> str:
    """Return ``field`` if --set takes it in this command, else an empty text."""
    fields: Mapping[str, Collection[str]] = {PLAN_SET: settable_fields(), GENERATION_SET: GenerationOptions.model_fields}
    return field if field in fields.get(metavars.get("--set", ""), ()) else ""
