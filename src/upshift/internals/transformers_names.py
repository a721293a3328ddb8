"""List the undocumented names of transformers that Upshift uses, each with the feature that needs it."""

from __future__ import annotations

from upshift.internals.lookup import Internal, Mark

LOADING = "Loading a model"
MERGING = "Weights that one file stores apart and the model together"
TENSOR = "Tensor parallelism"
TENSOR_INSTEAD = "use tensor_parallel=1"
EXPERTS = "Expert parallelism"
EXPERTS_INSTEAD = "use expert_parallel=1"
CONTEXT = "Context parallelism"
CONTEXT_INSTEAD = "use context_parallel=1"
XLA = "Training and generation under XLA"
XLA_INSTEAD = "leave out --backend xla"
GGUF = "Reading a GGUF file"
GGUF_INSTEAD = "give the folder that the model was published in"
CORE = "transformers.core_model_loading"

# Runs.
TRACKER_CALLBACKS = Internal(
    "transformers", "transformers.integrations:get_reporting_integration_callbacks", "--report-to", "leave it out"
)
ACTIVATE_NEFTUNE = Internal("transformers", "transformers.integrations:activate_neftune", "--neftune-noise-alpha", "leave it out")
PARAMETER_NAMES = Internal(
    "transformers", "transformers.trainer_pt_utils:get_parameter_names", "--weight-decay as in transformers.Trainer"
)
# Loading.
GET_MODEL_CLASS = Internal(
    "transformers",
    "transformers.models.auto.auto_factory:_get_model_class",
    "An Auto class as model_class",
    "give the model's own class",
)
MODEL_MAPPING = Mark("transformers", "transformers.models.auto.auto_factory:_model_mapping", "An Auto class as model_class")
LOADING_OPTIONS = Internal("transformers", "transformers.modeling_utils:LoadStateDictConfig", LOADING)
LOADING_REPORT = Internal("transformers", "transformers.utils.loading_report:LoadStateDictInfo", LOADING)
PATCH_RECORDERS = Internal("transformers", "transformers.monkey_patching:patch_output_recorders", LOADING)
FINISH_LOADING = Internal("transformers", "PreTrainedModel._finalize_model_loading", LOADING)
DTYPE_PLAN = Internal("transformers", "PreTrainedModel._get_dtype_plan", LOADING)
FROM_CONFIG = Internal("transformers", "PreTrainedModel._from_config", "Building a model from its config")
WEIGHT_CONVERSIONS = Mark("transformers", f"{CORE}:_weight_conversions", "Saving a model as it was stored")
NAME_CHANGES = Internal("transformers", "transformers.conversion_mapping:get_model_conversion_mapping", LOADING)
RENAME = Internal("transformers", f"{CORE}:rename_source_key", LOADING)
NAME_ORDER = Internal("transformers", f"{CORE}:dot_natural_key", LOADING)
NAME_PATTERN = Internal("transformers", f"{CORE}:build_glob_alternation", LOADING)
SET_TENSOR = Internal("transformers", f"{CORE}:set_param_for_module", LOADING)
CONVERTER = Internal("transformers", f"{CORE}:WeightConverter", LOADING)
RENAMING = Internal("transformers", f"{CORE}:WeightRenaming", LOADING)
SKIPPED = Internal("transformers", f"{CORE}:SkipParameters", LOADING)
CONCATENATE = Internal("transformers", f"{CORE}:Concatenate", MERGING)
STACK = Internal("transformers", f"{CORE}:MergeModulelist", MERGING)
REVERT = Internal("transformers", f"{CORE}:revert_weight_conversion", MERGING)
GGUF_NAMES = Internal("transformers", "transformers.modeling_gguf_pytorch_utils:get_gguf_hf_weights_map", GGUF, GGUF_INSTEAD)
GGUF_CHECKPOINT = Internal("transformers", "transformers.modeling_gguf_pytorch_utils:load_gguf_checkpoint", GGUF, GGUF_INSTEAD)
GGUF_PROCESSORS = Internal("transformers", "transformers.modeling_gguf_pytorch_utils:TENSOR_PROCESSORS", GGUF, GGUF_INSTEAD)
GGUF_PROCESSOR = Internal("transformers", "transformers.modeling_gguf_pytorch_utils:TensorProcessor", GGUF, GGUF_INSTEAD)
GGUF_METADATA = Internal("transformers", "transformers.integrations.gguf:read_gguf_metadata", GGUF, GGUF_INSTEAD)
ROPE_FUNCTIONS = Internal(
    "transformers", "transformers.modeling_rope_utils:ROPE_INIT_FUNCTIONS", "The engine llamacpp", "use another engine (--engine)"
)
CLASS_NAMES = Internal("transformers", "transformers.models.auto:modeling_auto", "Finding what a model is for")
RENDER_CHAT = Internal(
    "transformers",
    "transformers.utils.chat_template_utils:render_jinja_template",
    "Training on chats with a chat template that marks the assistant's turns",
    "learn all tokens (--loss-on all)",
)
COMPILE_TEMPLATE = Internal(
    "transformers",
    "transformers.utils.chat_template_utils:_compile_jinja_template",
    "Options of a chat template in requests, and --chat-template",
    "leave them out",
)

# Declarations of a model.
NO_SPLIT = Internal("transformers", "PreTrainedModel._no_split_modules", "Profiles of a model")
WHOLE_MODULES = Mark("transformers", "transformers.modeling_utils:_no_split_modules", "Placing a model on several devices")
DIVISION = Internal(
    "transformers",
    "transformers.distributed.configuration_utils:DistributedConfig",
    "encode and generate with --tensor-parallel",
    "leave it out",
)
TENSOR_PLAN = Mark("transformers", "transformers.modeling_utils:_tp_plan", TENSOR, TENSOR_INSTEAD)
SUPPORTS_BACKEND = Internal("transformers", "PreTrainedModel._supports_attention_backend", CONTEXT, CONTEXT_INSTEAD)
ATTENTION = Internal("transformers", "PretrainedConfig._attn_implementation", "Choosing a model's attention kernel")
MASK_FUNCTIONS = Internal("transformers", "transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS", CONTEXT, CONTEXT_INSTEAD)
ATTENTION_FUNCTIONS = Internal("transformers", "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS", CONTEXT, CONTEXT_INSTEAD)
PACKED_ROWS = Internal(
    "transformers", "transformers.masking_utils:find_packed_sequence_indices", "Measuring a model without its weights"
)
GROUPED_PRODUCT = Internal("transformers", "transformers.integrations.moe:_can_use_grouped_mm", "Measuring a mixture of experts")
CAUSAL_LOSS = Internal("transformers", "transformers.loss.loss_utils:ForCausalLMLoss", CONTEXT, CONTEXT_INSTEAD)
MASKED_LOSS = Internal("transformers", "transformers.loss.loss_utils:ForMaskedLMLoss", CONTEXT, CONTEXT_INSTEAD)
LOSS_FUNCTION = Mark("transformers", "transformers.modeling_utils:_loss_function", "A loss function of your own")
ADAPTER_LOADED = Mark("transformers", "transformers.integrations.peft:_hf_peft_config_loaded", "Training an adapter")
IGNORED_MISSING = Mark("transformers", "transformers.modeling_utils:_keys_to_ignore_on_load_missing", LOADING)
IGNORED_UNEXPECTED = Mark("transformers", "transformers.modeling_utils:_keys_to_ignore_on_load_unexpected", LOADING)
PREPARE_INPUTS = Internal("transformers", "Trainer._prepare_inputs", "upshift.Trainer")
SAFE_GLOBALS = Internal("transformers", "transformers.trainer_pt_utils:safe_globals", "Resuming transformers' checkpoints")
NOT_SAVED = Mark("transformers", "transformers.modeling_utils:_keys_to_ignore_on_save", "Saving a model")
INPUT_GRADIENTS = Mark("transformers", "transformers.modeling_utils:_require_grads_hook", "Activation checkpointing")
CHECKPOINTED = Mark(
    "transformers",
    "transformers.modeling_layers:_gradient_checkpointing_func",
    "Recomputing layers of offloaded weights",
    "use activation_checkpointing=off",
)

# Several processes.
EXPAND_PLAN = Internal("transformers", "PreTrainedModel._expand_parallel_plan", TENSOR, TENSOR_INSTEAD)
PARALLEL_STYLES = Internal("transformers", "transformers.distributed.tensor_parallel:ALL_PARALLEL_STYLES", TENSOR, TENSOR_INSTEAD)
DIVIDE_EXPERTS = Internal(
    "transformers", "transformers.distributed.expert_parallel:apply_expert_parallelism", EXPERTS, EXPERTS_INSTEAD
)
FSDP_MANAGED = Mark(
    "transformers", "transformers.distributed.fsdp:_is_fsdp_managed_module", "Generation during evaluation of a divided model"
)

# The Trainer.
PUSH_CHECKPOINT = Internal(
    "transformers", "Trainer._push_from_checkpoint", "push_to_hub of checkpoints", "leave push_to_hub unset"
)
SEARCH_BACKEND = Internal(
    "transformers",
    "transformers.hyperparameter_search:default_hp_search_backend",
    "hyperparameter_search without a backend",
    'give backend="optuna"',
)

# XLA.
INITIALIZED = Mark("transformers", "transformers.initialization:_is_hf_initialized", XLA, XLA_INSTEAD)
INITIALIZE = Internal("transformers", "PreTrainedModel._initialize_missing_keys", XLA, XLA_INSTEAD)
EXPERTS_KERNEL = Mark("transformers", "transformers.modeling_utils:_experts_implementation", XLA, XLA_INSTEAD)
EXPERTS_FUNCTIONS = Internal("transformers", "transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS", XLA, XLA_INSTEAD)
BATCHED_EXPERTS = Internal("transformers", "transformers.integrations.moe:batched_mm_experts_forward", XLA, XLA_INSTEAD)

# Methods of transformers' Trainer that upshift.Trainer overrides or calls. If one is renamed, the override is never called.
TRAINER_METHODS = tuple(
    Internal("transformers", f"Trainer.{name}", "upshift.Trainer", "use upshift train")
    for name in (
        "_clip_grad_norm", "_finalize_training", "_get_grad_norm", "_get_output_dir", "_inner_training_loop", "_load_best_model",
        "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state", "_load_scaler", "_maybe_log_save_evaluate",
        "_prepare_for_training", "_prepare_inputs", "_push_from_checkpoint", "_save", "_save_checkpoint",
        "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler", "_tune_save_checkpoint",
    )
)  # fmt: skip
