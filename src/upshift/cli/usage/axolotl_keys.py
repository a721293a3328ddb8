"""List the keys of Axolotl's config (version 0.19): options of ours, choices of the plan, and the keys that are rejected."""

from __future__ import annotations

from collections.abc import Mapping

OPTION_OF: Mapping[str, str] = {  # keys with an option of the same meaning
    "base_model": "model",
    "output_dir": "output",
    "sequence_len": "sequence-length",
    "num_epochs": "epochs",
    "max_steps": "max-steps",
    "learning_rate": "learning-rate",
    "weight_decay": "weight-decay",
    "max_grad_norm": "max-grad-norm",
    "seed": "seed",
    "warmup_steps": "warmup-steps",
    "warmup_ratio": "warmup-ratio",
    "logging_steps": "logging-steps",
    "save_total_limit": "save-total-limit",
    "early_stopping_patience": "early-stopping-patience",
    "neftune_noise_alpha": "neftune-noise-alpha",
    "rl_beta": "dpo-beta",
    "dpo_beta": "dpo-beta",
    "dpo_label_smoothing": "dpo-label-smoothing",
    "center_rewards_coefficient": "center-rewards-coefficient",
    "load_best_model_at_end": "load-best",
    "auto_resume_from_checkpoints": "resume",
    "tensor_parallel_size": "tensor-parallel",
    "context_parallel_size": "context-parallel",
}

# The plan makes these choices. None of them changes what is computed.
_PLANNED = """
sample_packing eval_sample_packing pad_to_sequence_len pad_to_multiple_of sample_packing_group_size sample_packing_bin_size
sample_packing_sequentially sample_packing_mp_start_method sample_packing_eff_est eval_batch_size auto_find_batch_size
batch_flattening multipack_real_batches flash_attention sdp_attention xformers_attention eager_attention flex_attention
flex_attn_compile_kwargs attn_implementation flash_attn_cross_entropy flash_attn_fuse_mlp sdpa_varlen fused_attn_kernel
gradient_checkpointing gradient_checkpointing_kwargs selective_checkpointing activation_offloading layer_offloading tf32
float32 torch_compile torch_compile_backend torch_compile_mode torch_compile_options deepspeed deepcompile fsdp fsdp_config
fsdp_version fsdp_final_state_dict_type dp_shard_size dp_replicate_size ddp ddp_timeout ddp_bucket_cap_mb
ddp_broadcast_buffers ddp_find_unused_parameters lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel
chunked_cross_entropy chunked_cross_entropy_num_chunks tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp use_kernels
experts_implementation dpo_use_liger_kernel precompute_ref_log_probs qlora_sharded_model_loading low_cpu_mem_usage device_map
max_memory gpu_memory_limit heads_k_stride ring_attn_func gc_steps gc_collect_steps torch_empty_cache_steps lora_on_cpu
accelerator_config
"""
PLANNED = frozenset(_PLANNED.split())

# Nothing follows from these keys here: the model's config and the files say it, or it is always so.
_WITHOUT_EFFECT = """
axolotl_config_path dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataset_keep_in_memory
dataset_num_proc dataset_prepared_path dataset_processes dataset_shard_num greater_is_better hf_use_auth_token include_tkps
include_tokens_per_second is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model
model_type remove_unused_columns save_only_model save_safetensors shuffle_merged_datasets strict tokenizer_save_jinja_files
tokenizer_type tokenizer_use_fast type_of_model
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())

# The other keys of Axolotl's config. They are rejected unless they turn something off.
_OTHER_KEYS = """
adam_beta3 adam_epsilon2 added_tokens_overrides base_model_config batch_size bench_dataset bench_split bnb_config_kwargs
chat_template_kwargs cls_model_config comet_api_key comet_experiment_config
comet_experiment_key comet_mode comet_online comet_project_name comet_workspace cosine_constant_lr_ratio cosine_min_lr_ratio
cpo_alpha curriculum_sampling dataloader_drop_last dataset_exact_deduplication dataset_shard_idx default_system_message device
dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of do_bench_eval do_causal_lm_eval dpo_generate_during_eval
dpo_norm_loss dpo_padding_free dpo_use_logits_to_keep dpo_use_weighting
dynamic_checkpoint eaft_alpha eaft_k ebft embedding_lr embedding_lr_scale embeddings_skip_upcast
eval_causal_lm_metrics eval_max_new_tokens eval_sequence_len eval_table_size evaluation_strategy
experimental_skip_move_to_device fix_untrained_tokens flash_attn_d512 flash_attn_rms_norm flash_optimum fp32_norm_classes
fp32_norms fp8_config fp8_enable_fsdp_float8_all_gather freeze_mm_modules gemma4_hybrid_attn_impl generate_samples
generation_do_sample generation_max_new_tokens generation_prompt_ratio generation_temperature generation_top_k
generation_top_p gptq gradio_max_new_tokens gradio_server_name gradio_server_port gradio_share gradio_temperature gradio_title
group_by_length hf_mlflow_log_artifacts hub_model_id hub_revision hub_strategy image_resize_algorithm image_size is_preprocess
jagged_restart_anneal_steps jagged_restart_steps jagged_restart_warmup_steps kto_desirable_weight kto_undesirable_weight
large_head_attention lisa_layers_attribute lisa_n_layers lisa_step_interval llama4_linearized_experts load_in_8bit local_rank
lora_alpha_pattern lora_fan_in_fan_out lora_model_dir lora_rank_pattern lora_target_parameters loraplus_lr_embedding
loraplus_lr_ratio loss_watchdog_patience loss_watchdog_threshold lr_div_factor lr_groups lr_quadratic_warmup
lr_scheduler_kwargs max_packed_sequence_len max_prompt_len mean_resizing_embeddings merge_lora merge_method
metric_for_best_model min_sample_len model_config model_kwargs model_quantization_config model_quantization_config_kwargs
model_revision noisy_embedding_alpha num_dataset_shards_to_save num_generation_samples optim_args optim_target_modules
orpo_alpha otel_metrics_host otel_metrics_port overrides_of_model_config overrides_of_model_kwargs peft
peft_autocast_adapter_dtype peft_ensure_weight_tying peft_init_lora_weights peft_layer_replication peft_layers_pattern
peft_layers_to_transform peft_trainable_token_indices ple_cpu_offload pose_max_context_len pose_num_chunks
pose_split_on_token_ids preprocess_iterable pretrain_multipack_attn pretrain_multipack_buffer_size pretraining_dataset
pretraining_sample_concatenation process_reward_model processor_kwargs processor_type profiler_steps profiler_steps_start
push_dataset_to_hub qat qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits qgalore_proj_group_size qgalore_proj_quant
qgalore_proj_type qgalore_queue_size qgalore_rank qgalore_scale qgalore_update_proj_gap quantization quantize_moe_experts
ray_num_workers ray_run_name reinit_weights relora relora_cpu_offload relora_prune_method relora_prune_ratio
resize_token_embeddings_to_32x resources_per_worker resume_from_checkpoint revision_of_model role_boundaries rope_scaling
rpo_alpha s2_attention sage_attention save_first_step scaling_softmax scaling_softmax_bias scaling_softmax_factor
sequence_parallel_degree shrink_embeddings shuffle_before_merging_datasets simpo_gamma skip_prepare_dataset streaming
streaming_multipack_buffer_size tokenizer_legacy tokenizer_use_mistral_common tokens torchdistx_path total_num_tokens
total_supervised_tokens trackio_project_name trackio_run_name trackio_space_id trainer_cls trl trust_remote_code
unfrozen_parameters use_comet use_eaft use_onebitllms use_otel_metrics use_pose use_ray vllm wandb_log_model wandb_watch
world_size
"""
OTHER_KEYS = frozenset(_OTHER_KEYS.split())

REMARKS: Mapping[str, str] = {  # what to do instead of a key
    "trust_remote_code": "code from a model's files is never run",
    "load_in_8bit": "use adapter: qlora, which stores the weights in 4 bits",
    "lora_model_dir": "give the folder of the adapter as base_model",
    "batch_size": "give gradient_accumulation_steps",
    "resume_from_checkpoint": "add --resume, which goes on from the newest checkpoint of the output folder",
    "pretraining_dataset": "give the texts as datasets with type: completion",
    "group_by_length": "the plan sorts the rows of a batch alone, so that the order of the data stays",
    "hub_model_id": "push the output folder after the run",
    "default_system_message": "write it into the rows, or into the chat template",
    "base_model_config": "give a folder with the config and the weights as base_model",
    "max_packed_sequence_len": "give sequence_len",
    "evaluation_strategy": "add --eval-steps N",
    "loss_watchdog_threshold": "a run stops by itself if the loss is not a number; remove it",
    "loss_watchdog_patience": "a run stops by itself if the loss is not a number; remove it",
    "kto_desirable_weight": "train by upshift.trl.KTOTrainer in a script",
    "kto_undesirable_weight": "train by upshift.trl.KTOTrainer in a script",
    "trl": "train by upshift.trl.GRPOTrainer in a script",
}
