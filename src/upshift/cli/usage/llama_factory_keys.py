"""List the keys of LLaMA-Factory's config (version 0.9.5): options of ours, choices of the plan, and rejected keys."""

from __future__ import annotations

from collections.abc import Mapping

OPTION_OF: Mapping[str, str] = {  # keys with an option of the same meaning
    "model_name_or_path": "model",
    "output_dir": "output",
    "overwrite_output_dir": "overwrite",
    "max_steps": "max-steps",
    "learning_rate": "learning-rate",
    "weight_decay": "weight-decay",
    "max_grad_norm": "max-grad-norm",
    "lr_scheduler_type": "lr-scheduler-type",
    "warmup_steps": "warmup-steps",
    "warmup_ratio": "warmup-ratio",
    "seed": "seed",
    "logging_steps": "logging-steps",
    "save_total_limit": "save-total-limit",
    "load_best_model_at_end": "load-best",
    "neftune_noise_alpha": "neftune-noise-alpha",
}

# The plan makes these choices. None of them changes what is computed.
_PLANNED = """
flash_attn enable_liger_kernel use_unsloth use_unsloth_gc disable_gradient_checkpointing gradient_checkpointing
gradient_checkpointing_kwargs use_reentrant_gc low_cpu_mem_usage deepspeed fsdp fsdp_config packing group_by_length tf32
torch_compile torch_compile_backend torch_compile_mode per_device_eval_batch_size eval_accumulation_steps auto_find_batch_size
device_map use_v1_kernels
"""
PLANNED = frozenset(_PLANNED.split())

# Nothing follows from these keys here.
_WITHOUT_EFFECT = """
do_train do_eval overwrite_cache preprocessing_num_workers preprocessing_batch_size dataloader_num_workers plot_loss ddp_timeout
logging_dir logging_strategy logging_first_step use_fast_tokenizer cache_dir data_shared_file_system save_only_model
save_safetensors remove_unused_columns print_param_status include_num_input_tokens_seen include_tokens_per_second
include_effective_tokens_per_second disable_tqdm dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers
ddp_find_unused_parameters compute_accuracy infer_backend infer_dtype use_kv_cache offload_folder double_quantization
quantization_type quantization_device_map ray_run_name buffer_size eval_num_beams media_dir metric_for_best_model
greater_is_better hub_strategy ignore_pad_token_for_loss data_seed run_name
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())

# The other keys. They are rejected unless they turn something off.
_OTHER = """
adapter_name_or_path adapter_folder resize_vocab split_special_tokens add_tokens add_special_tokens new_special_tokens_config
init_special_tokens model_revision rope_scaling shift_attn mixture_of_depths moe_aux_loss_coef upcast_layernorm
upcast_lmhead_output train_from_scratch hf_hub_token ms_hub_token om_hub_token trust_remote_code quantization_method export_dir
export_size export_device use_kt streaming interleave_probs eval_on_each_dataset neat_packing tool_format preserve_thinking
tokenized_path freeze_trainable_layers freeze_trainable_modules freeze_extra_modules loraplus_lr_ratio loraplus_lr_embedding
pissa_init pissa_iter pissa_convert create_new_adapter module_dropout oft_rank oft_block_size oft_target pref_bco_weight
dpo_label_smoothing kto_chosen_weight kto_rejected_weight ppo_buffer_size ppo_epochs ppo_score_norm ppo_target
ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model reward_model_adapters
reward_model_quantization_bit reward_model_type ld_alpha use_galore use_apollo use_badam use_swanlab pure_bf16 use_llama_pro
use_adam_mini use_mca use_hyper_parallel hyper_parallel_args use_muon use_dft_loss use_asft_loss use_eaft_loss
freeze_vision_tower freeze_multi_modal_projector freeze_language_model freeze_multimodal_projector disable_shuffling
early_stopping_steps fp8 fp8_backend predict_with_generate do_predict push_to_hub hub_model_id hub_token ray_num_workers
adam_beta1 adam_beta2 adam_epsilon label_smoothing_factor optim_args optim_target_modules eval_delay lr_scheduler_kwargs
image_max_pixels image_min_pixels video_max_pixels video_min_pixels max_new_tokens top_p temperature num_beams
use_cpu average_tokens_across_devices include_for_metrics torch_empty_cache_steps
"""
OTHER_KEYS = frozenset(_OTHER.split())

REMARKS: Mapping[str, str] = {  # what to do instead of a key
    "trust_remote_code": "code from a model's files is never run",
    "adapter_name_or_path": "give the folder of the adapter as model_name_or_path",
    "neat_packing": "the plan packs rows so that none reads another; use packing or nothing",
    "preserve_thinking": "thoughts of earlier turns are kept in supervised training; leave it out",
    "early_stopping_steps": "add --early-stopping-patience N",
    "push_to_hub": "push the output folder after the run",
    "pure_bf16": "add --set precision=bf16-weights --allow bf16-weights",
    "fp8": "add --set precision=fp8 --allow fp8",
    "streaming": "data is never all in memory here; leave it out",
    "tokenized_path": "rows are tokenized at each start; leave it out",
    "ref_model": "the reference is the model before the training",
    "do_predict": "upshift train does not generate; use upshift generate with the trained model",
    "predict_with_generate": "upshift train does not generate; use upshift generate with the trained model",
    "train_from_scratch": "add --from-config",
}
