"""Every apex name: whether ampctx supports it, and its name in ampctx or torch. Data only.

``compat.install``, ``ampctx migrate`` and docs/apex_names.md read this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ampctx_apex.name import Name, below
from ampctx_apex.names_layers import EXTENSIONS, LAYERS, MISSING


def _all(module: str, names: str, entry: Name) -> dict[str, Name]:
    """The same entry for several names of a module."""
    return {f"{module}.{name}": entry for name in names.split()}


_FUNCTIONS = """
    initialize scale_loss master_params state_dict load_state_dict disable_casts half_function bfloat16_function
    float_function promote_function register_half_function register_bfloat16_function register_float_function
    register_promote_function
"""
_SUPPORTED = Name("supported")
# apex's private state: a view on the default session of ampctx.amp.
_VIEW = Name("supported", None, "A live view on the session of ampctx.amp.")
_BY_TORCH = Name("refused", None, "torch.autocast casts instead; ampctx replaces no torch function.")
_BY_INITIALIZE = Name("refused", None, "Call ampctx.amp.initialize, which includes this.")

AMP: dict[str, Name] = {
    **{f"apex.amp.{name}": Name("supported", f"ampctx.amp.{name}") for name in _FUNCTIONS.split()},
    **{
        f"apex.amp.amp.{name}": Name("supported", f"ampctx.amp.{name}")
        for name in _FUNCTIONS.split()
        if "function" in name or name in ("initialize", "state_dict", "load_state_dict")
    },
    **{
        f"apex.amp.frontend.{n}": Name("supported", f"ampctx.amp.{n}")
        for n in ("initialize", "state_dict", "load_state_dict")
    },
    **{f"apex.amp.handle.{n}": Name("supported", f"ampctx.amp.{n}") for n in ("scale_loss", "disable_casts")},
    "apex.amp.init": Name("adapted", None, "Casts are torch's autocast; caching and verbose have no effect."),
    "apex.amp.amp.init": Name("adapted", None, "As apex.amp.init."),
    "apex.amp.amp._DECORATOR_HANDLE": _VIEW,
    "apex.amp._amp_state": _VIEW,
    "apex.amp._amp_state.AmpState": _VIEW,
    "apex.amp._amp_state._amp_state": _VIEW,
    **_all(
        "apex.amp._amp_state",
        "verbosity allow_incoming_model_not_fp32 opt_properties loss_scalers min_loss_scale max_loss_scale handle",
        _VIEW,
    ),
    "apex.amp._amp_state.hard_override": Name(
        "adapted", None, "Affects warn_or_err and assignments to opt_properties; initialize still raises."
    ),
    "apex.amp._amp_state.master_params": Name("supported", "ampctx.amp.master_params"),
    **_all("apex.amp._amp_state", "maybe_print warn_or_err", _SUPPORTED),
    "apex.amp._initialize": _SUPPORTED,
    **_all("apex.amp._initialize", "to_type applier", _SUPPORTED),
    **_all("apex.amp._initialize", "_initialize check_models check_optimizers check_params_fp32", _BY_INITIALIZE),
    "apex.amp._initialize.O2StateDictHook": _BY_INITIALIZE,
    "apex.amp._process_optimizer": _SUPPORTED,
    "apex.amp._process_optimizer.AmpOptimizerState": _VIEW,
    **_all(
        "apex.amp._process_optimizer.AmpOptimizerState",
        """
        all_fp16_params all_fp32_from_fp16_params all_fp32_from_fp32_params all_fp32_params fp16_groups
        fp32_from_fp16_groups fp32_from_fp32_groups all_fp16_grad_stash all_fp32_from_fp32_grad_stash
        all_fp32_grad_stash params_have_scaled_gradients multi_tensor_scale multi_tensor_l2norm dummy_overflow_buf
        """,
        Name("supported", None, "Computed on each read. bfloat16 counts as fp16."),
    ),
    "apex.amp._process_optimizer.AmpOptimizerState.lazy_init_called": Name(
        "adapted", None, "True after initialize, which creates the masters."
    ),
    "apex.amp._process_optimizer.AmpOptimizerState.already_patched": Name(
        "adapted", None, "Whether the next step will be skipped: a host sync. Assigning it does not change the step."
    ),
    **_all(
        "apex.amp._process_optimizer",
        """
        _master_params_to_model_params _amp_lazy_init lazy_init_with_master_weights lazy_init_no_master_weights
        prepare_backward_with_master_weights prepare_backward_no_master_weights
        prepare_backward_with_master_weights_FusedSGD prepare_backward_no_master_weights_FusedSGD
        post_backward_with_master_weights post_backward_no_master_weights
        post_backward_with_master_weights_FusedSGD post_backward_no_master_weights_FusedSGD
        """,
        Name("supported", None, "Calls the method that amp adds to the optimizer."),
    ),
    "apex.amp._process_optimizer.post_backward_models_are_masters": Name(
        "refused", None, "Call optimizer._post_amp_backward(scaler), which unscales all gradients of the optimizer."
    ),
    "apex.amp._process_optimizer._process_optimizer": _BY_INITIALIZE,
    "apex.amp.compat": _SUPPORTED,
    **_all(
        "apex.amp.compat",
        """
        variable_is_tensor tensor_is_variable tensor_is_float_tensor is_tensor_like is_floating_point scalar_python_val
        filter_attrs
        """,
        _SUPPORTED,
    ),
    "apex.amp.frontend": _SUPPORTED,
    "apex.amp.frontend.Properties": _SUPPORTED,
    "apex.amp.frontend.opt_levels": Name(
        "supported", None, "Callables, as in apex; ampctx.amp.OPT_LEVELS has policies."
    ),
    **_all("apex.amp.frontend", "O0 O1 O2 O3 O4 O5 warn_or_err maybe_print", _SUPPORTED),
    "apex.amp.handle": _SUPPORTED,
    "apex.amp.handle.AmpHandle": Name("adapted", None, "The cache is torch's; nothing is printed per cast."),
    "apex.amp.handle.AmpHandle.scale_loss": Name(
        "refused", None, "Call ampctx.amp.scale_loss; apex refused this call too."
    ),
    **_all(
        "apex.amp.handle.AmpHandle",
        """
        is_active _is_active _disable_casts wrap_optimizer _clear_cache _save_func _deactivate has_cache cache
        remove_cache verbose _all_wrappers _default_scaler _enable_caching _verbose _cache
        """,
        _SUPPORTED,
    ),
    "apex.amp.handle.NoOpHandle": _SUPPORTED,
    "apex.amp.lists": Name("adapted", None, "Read-only: changing a list raises. Register functions instead."),
    **_all("apex.amp.lists", "functional_overrides torch_overrides tensor_overrides", _SUPPORTED),
    "apex.amp.opt": _SUPPORTED,
    "apex.amp.opt.OptimWrapper": Name("adapted", None, "Unscales gradients; apex multiplied the weights."),
    "apex.amp.rnn_compat": _SUPPORTED,
    **_all("apex.amp.rnn_compat", "has_old_rnns RNN_NAMES", _SUPPORTED),
    **_all("apex.amp.rnn_compat", "VariableFunctionsShim whitelist_rnn_cells", _BY_TORCH),
    "apex.amp.scaler": _SUPPORTED,
    "apex.amp.scaler.LossScaler": Name(
        "adapted", None, "scale_factor has its effect, the scale stays above 0, and _scale_seq_len is a threshold."
    ),
    **_all(
        "apex.amp.scaler.LossScaler",
        """
        dynamic loss_scale _loss_scale _unskipped _has_overflow _overflow_buf _min_loss_scale _max_loss_scale
        _scale_seq_len clear_overflow_state update_scale unscale unscale_python unscale_with_stashed
        unscale_with_stashed_python has_fused_kernel warned_no_fused_kernel warned_unscaling_non_fp32_grad
        multi_tensor_scale_cuda multi_tensor_axpby_cuda
        """,
        _VIEW,
    ),
    **_all("apex.amp.scaler", "scale_check_overflow_python axpby_check_overflow_python", _SUPPORTED),
    "apex.amp.utils": _SUPPORTED,
    **_all(
        "apex.amp.utils",
        """
        is_cuda_enabled get_cuda_version is_fp_tensor is_nested should_cache collect_fp_tensor_types type_string
        maybe_half maybe_bfloat16 maybe_float casted_args cached_cast verbosify as_inplace has_func get_func set_func
        set_func_save
        """,
        _SUPPORTED,
    ),
    **_all("apex.amp.utils", "synthesize_flattened_rnn_weights new_synthesize_flattened_rnn_weights", _BY_TORCH),
    "apex.amp.wrap": _SUPPORTED,
    **_all("apex.amp.wrap", "make_cast_wrapper make_promote_wrapper", _SUPPORTED),
    **_all(
        "apex.amp.wrap",
        """
        cached_cast promote sequence_promote promote_match_arg0 err_if_any_half err_if_arg0_half rnn_cast new_rnn_cast
        """,
        _BY_TORCH,
    ),
    "apex.amp.wrap.disable_casts": Name("refused", None, "Call the function inside ampctx.amp.disable_casts()."),
    "apex.DeprecatedFeatureWarning": Name("adapted", None, "ampctx itself never warns with it."),
    "apex.deprecated_warning": _SUPPORTED,
    "apex.check_cudnn_version_and_warn": _SUPPORTED,
    "apex.RankInfoFormatter": Name("adapted", None, "Importing apex does not change logging."),
}


_FUSED = {
    "FusedAdam": "fused_adam",
    "FusedSGD": "fused_sgd",
    "FusedLAMB": "fused_lamb",
    "FusedMixedPrecisionLamb": "fused_mixed_precision_lamb",
    "FusedNovoGrad": "fused_novograd",
    "FusedAdagrad": "fused_adagrad",
}
# The kernels that instances of each class carry in apex, and what a group of apex's holds besides its options.
_FUSED_KERNELS = {
    "FusedAdam": "multi_tensor_adam multi_tensor_adam_capturable multi_tensor_adam_capturable_master",
    "FusedSGD": "multi_tensor_sgd",
    "FusedLAMB": "multi_tensor_l2norm multi_tensor_lamb",
    "FusedMixedPrecisionLamb": "multi_tensor_l2norm multi_tensor_lamb",
    "FusedNovoGrad": "multi_tensor_novograd",
    "FusedAdagrad": "multi_tensor_adagrad",
}
_FUSED_ATTRIBUTES = {
    "FusedAdam": "adam_w_mode capturable master_weights param_groups_master _step_supports_amp_scaling",
    "FusedSGD": "wd_after_momentum materialize_master_grads most_recent_scale scale_set_by_backward",
    "FusedLAMB": "adam_w_mode use_nvlamb",
    "FusedMixedPrecisionLamb": "adam_w_mode use_nvlamb reduced_precision_dtype param_groups_full_precision "
    "_step_supports_amp_scaling",
    "FusedNovoGrad": "moment_mode",
    "FusedAdagrad": "adagrad_w_mode",
}
_LARS = Name("refused", "ampctx.optimizers.LARC", "Use ampctx.optimizers.LARC around FusedSGD.")
_SHARDED = Name(
    "refused",
    "torch.distributed.optim.ZeroRedundancyOptimizer",
    "Use torch.distributed.fsdp, or torch.distributed.optim.ZeroRedundancyOptimizer around an optimizer of "
    "ampctx.optimizers.",
)
_OLD_FP16_OPTIMIZER = Name(
    "supported", None, "A static scale skips on overflow, too, as in apex; step() takes no closure."
)

OPTIMIZERS: dict[str, Name] = {
    "apex.optimizers": Name("supported", "ampctx.optimizers"),
    **{f"apex.optimizers.{name}": Name("supported", f"ampctx.optimizers.{name}") for name in _FUSED},
    **{
        f"apex.optimizers.{module}.{name}": Name("supported", f"ampctx.optimizers.{name}")
        for name, module in _FUSED.items()
    },
    **{f"apex.optimizers.{module}": Name("supported", "ampctx.optimizers") for module in _FUSED.values()},
    "apex.optimizers.FP16_Optimizer": _OLD_FP16_OPTIMIZER,
    "apex.optimizers.fp16_optimizer": Name("supported"),
    "apex.optimizers.fp16_optimizer.FP16_Optimizer": _OLD_FP16_OPTIMIZER,
    "apex.optimizers.FusedLARS": _LARS,
    "apex.optimizers.fused_lars": _LARS,
}
for _name in _FUSED:
    _prefix = f"apex.optimizers.{_name}"
    OPTIMIZERS.update(below(_prefix, _FUSED_ATTRIBUTES[_name], "supported"))
    OPTIMIZERS.update(below(_prefix, "set_grad_none", "supported"))
    OPTIMIZERS.update(below(_prefix, "_dummy_overflow_buf", "adapted", "A flag for programs: step does not read it."))
    OPTIMIZERS.update(below(_prefix, _FUSED_KERNELS[_name], "supported", "From the import of apex.optimizers on."))
    OPTIMIZERS[f"{_prefix}.zero_grad"] = Name("supported", f"ampctx.optimizers.{_name}.zero_grad")
    OPTIMIZERS[f"{_prefix}.step"] = Name("supported", f"ampctx.optimizers.{_name}.step")

OPTIMIZERS |= {
    "apex.contrib": Name("supported"),
    "apex.contrib.optimizers": Name("supported"),
    "apex.contrib.optimizers.FP16_Optimizer": _OLD_FP16_OPTIMIZER,
    "apex.contrib.optimizers.fp16_optimizer": Name("supported"),
    "apex.contrib.optimizers.fp16_optimizer.FP16_Optimizer": _OLD_FP16_OPTIMIZER,
    **below(
        "apex.contrib.optimizers.FP16_Optimizer",
        "optimizer fp16_groups fp32_groups loss_scale dynamic_loss_scale cur_scale cur_iter last_overflow_iter "
        "scale_factor scale_window verbose state param_groups zero_grad backward step state_dict load_state_dict",
        "supported",
    ),
    **below(
        "apex.contrib.optimizers.FP16_Optimizer",
        "overflow_buf multi_tensor_l2norm _update_scale",
        "refused",
        "Read overflow after step().",
    ),
}
for _module in ("apex.contrib.optimizers", "apex.contrib.optimizers.fused_adam"):
    OPTIMIZERS[f"{_module}.FusedAdam"] = Name(
        "adapted",
        None,
        "Keeps the old eps and weight decay; eps_inside_sqrt raises. For new code: ampctx.optimizers.FusedAdam, with "
        "AdamW's eps and decay, other positional arguments, and a step without the old arguments.",
    )
for _module in ("apex.contrib.optimizers", "apex.contrib.optimizers.fused_sgd"):
    OPTIMIZERS[f"{_module}.FusedSGD"] = Name(
        "supported",
        None,
        "For new code: ampctx.optimizers.FusedSGD, whose step takes no grads, output_params and scale.",
    )
for _module in ("apex.contrib.optimizers", "apex.contrib.optimizers.fused_lamb"):
    OPTIMIZERS[f"{_module}.FusedLAMB"] = Name(
        "adapted",
        None,
        "max_grad_norm is against the norm of all groups together. For new code: ampctx.optimizers.FusedLAMB.",
    )
OPTIMIZERS |= below("apex.contrib.optimizers", "fused_adam fused_sgd fused_lamb", "supported")
# Programs probe for DistributedFusedAdam. They import the others whether or not they use them.
for _name in ("DistributedFusedAdam", "distributed_fused_adam"):
    OPTIMIZERS[f"apex.contrib.optimizers.{_name}"] = _SHARDED._replace(at_import=True)
for _name in (
    "DistributedFusedLAMB",
    "distributed_fused_lamb",
    "distributed_fused_adam_v2",
    "distributed_fused_adam_v3",
):
    OPTIMIZERS[f"apex.contrib.optimizers.{_name}"] = _SHARDED

_MTA = "ampctx.multi_tensor_apply"
_NORM_FLAG = "The flag reports inf and nan elements, not a sum of squares that overflows fp32."
_ANY_FLAG = "Any non-zero flag skips the step; apex skips on 1 only."
_NO_CLIP = "max_grad_norm=0 leaves gradients unchanged; apex sets them to 0."
KERNELS: dict[str, Name] = {
    "apex.multi_tensor_apply.MultiTensorApply": Name("supported", f"{_MTA}.MultiTensorApply"),
    "apex.multi_tensor_apply.multi_tensor_applier": Name("supported", f"{_MTA}.multi_tensor_applier"),
    "apex.multi_tensor_apply.multi_tensor_applier_l2norm": Name(
        "adapted", None, f"{_MTA}.multi_tensor_applier, with its own chunk size"
    ),
    "apex.multi_tensor_apply.multi_tensor_apply.MultiTensorApply": Name("supported", f"{_MTA}.MultiTensorApply"),
    "amp_C.multi_tensor_scale": Name("supported", f"{_MTA}.multi_tensor_scale"),
    "amp_C.multi_tensor_axpby": Name("supported", f"{_MTA}.multi_tensor_axpby"),
    "amp_C.multi_tensor_l2norm": Name("adapted", f"{_MTA}.multi_tensor_l2norm", _NORM_FLAG),
    "amp_C.multi_tensor_l2norm_mp": Name("adapted", note=_NORM_FLAG),
    "amp_C.multi_tensor_l2norm_scale": Name("adapted", note=_NORM_FLAG),
    "amp_C.multi_tensor_unscale_l2norm": Name("adapted", f"{_MTA}.multi_tensor_unscale_l2norm", _NORM_FLAG),
    "amp_C.multi_tensor_sgd": Name("supported"),
    "amp_C.multi_tensor_adam": Name("supported"),
    "amp_C.multi_tensor_adam_capturable": Name("adapted", note=_ANY_FLAG),
    "amp_C.multi_tensor_adam_capturable_master": Name("adapted", note=_ANY_FLAG),
    "amp_C.multi_tensor_adagrad": Name("supported"),
    "amp_C.multi_tensor_novograd": Name(
        "adapted", note="The infinity norm sees nan; the flag reports inf and nan gradient elements."
    ),
    "amp_C.multi_tensor_lamb": Name("adapted", note=_NO_CLIP),
    "amp_C.multi_tensor_lamb_mp": Name("adapted", note=_NO_CLIP),
    "amp_C.multi_tensor_lamb_stage1_cuda": Name("adapted", note=_NO_CLIP),
    "amp_C.multi_tensor_lamb_stage2_cuda": Name("supported"),
    "amp_C.multi_tensor_lars": Name("supported"),
    "amp_C.update_scale_hysteresis": Name("supported"),
    "apex_C.flatten": Name("supported"),
    "apex_C.unflatten": Name("supported"),
}

_DDP = Name(
    "adapted",
    None,
    "Wraps torch's DistributedDataParallel: delay_allreduce=True sets find_unused_parameters=True, message_size the "
    "bucket size, disable_allreduce() is no_sync(). Trigger parameters, streams, communicators and "
    "retain_allreduce_buffers have no effect. A model without trainable parameters raises.",
)
_SYNC_BATCH_NORM = Name(
    "supported", None, "For new code: torch.nn.SyncBatchNorm; it lacks channel_last, fuse_relu and z."
)

PARALLEL: dict[str, Name] = {
    "apex.parallel": Name("supported"),
    "apex.parallel.DistributedDataParallel": _DDP,
    "apex.parallel.distributed.DistributedDataParallel": _DDP,
    "apex.parallel.Reducer": Name("supported"),
    "apex.parallel.distributed.Reducer": Name("supported"),
    **{
        f"apex.parallel.distributed.{name}": Name("supported")
        for name in (
            "flatten",
            "unflatten",
            "apply_flat_dist_call",
            "split_by_type",
            "flat_dist_call",
            "extract_tensors",
        )
    },
    "apex.parallel.distributed.split_half_float_double": Name(
        "adapted", None, "Puts tensors of other types into lists of their own; apex drops them."
    ),
    "apex.parallel.ReduceOp": Name("supported", "torch.distributed.ReduceOp"),
    "apex.parallel.SyncBatchNorm": _SYNC_BATCH_NORM,
    "apex.parallel.sync_batchnorm.SyncBatchNorm": _SYNC_BATCH_NORM,
    "apex.parallel.optimized_sync_batchnorm.SyncBatchNorm": _SYNC_BATCH_NORM,
    "apex.parallel.convert_syncbn_model": Name(
        "adapted",
        None,
        "Keeps the parameter objects, so that earlier optimizers still step them; apex copied them. For new code: "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm, which creates torch's class and has no channel_last.",
    ),
    "apex.parallel.create_syncbn_process_group": Name("supported", None, "torch.distributed.new_subgroups(group_size)"),
    "apex.parallel.LARC.LARC": Name("supported", "ampctx.optimizers.LARC"),
    "apex.parallel.multiproc": Name(
        "supported", None, "For new code: torchrun, which passes ranks in the environment, not as arguments."
    ),
}

FP16_UTILS: dict[str, Name] = {
    "apex.fp16_utils": Name("supported"),
    **below("apex.fp16_utils", "fp16util fp16_optimizer loss_scaler", "supported"),
}
_NO_WARNING = "Without a deprecation warning."
for _prefix in ("apex.fp16_utils", "apex.fp16_utils.fp16util"):
    FP16_UTILS |= below(
        _prefix, "tofp16 BN_convert_float network_to_half convert_module master_params_to_model_params", "supported"
    )
    FP16_UTILS |= below(_prefix, "to_python_float", "supported")
    FP16_UTILS |= {
        f"{_prefix}.clip_grad_norm": Name("supported", "ampctx.clip_grad_norm_"),
        f"{_prefix}.FP16Model": Name("adapted", None, _NO_WARNING),
        f"{_prefix}.convert_network": Name(
            "adapted", None, "Casts affine batch norms to fp32, whatever their dtype was."
        ),
        f"{_prefix}.prep_param_lists": Name(
            "adapted", None, "One flat master may hold parameters of several dtypes; its gradient starts as zeros."
        ),
        f"{_prefix}.model_grads_to_master_grads": Name(
            "adapted", None, "In a flat master, a parameter without a gradient counts as zeros."
        ),
    }
for _prefix in ("apex.fp16_utils", "apex.fp16_utils.loss_scaler"):
    FP16_UTILS |= {
        f"{_prefix}.LossScaler": Name("adapted", None, _NO_WARNING),
        f"{_prefix}.DynamicLossScaler": Name(
            "adapted",
            None,
            "has_overflow checks all gradients with one host sync. For new code: ampctx.GradScaler, with different "
            "calls.",
        ),
    }
    FP16_UTILS |= below(
        f"{_prefix}.LossScaler",
        "cur_scale loss_scale has_overflow update_scale scale_gradient backward _has_inf_or_nan",
        "supported",
    )
    FP16_UTILS |= below(
        f"{_prefix}.DynamicLossScaler",
        "cur_scale cur_iter last_overflow_iter scale_factor scale_window loss_scale has_overflow update_scale "
        "scale_gradient backward _has_inf_or_nan",
        "supported",
    )
for _prefix in ("apex.fp16_utils.FP16_Optimizer", "apex.fp16_utils.fp16_optimizer.FP16_Optimizer"):
    FP16_UTILS[_prefix] = Name(
        "adapted",
        None,
        "Any device; bf16 parameters get masters, others are stepped directly; logs where apex printed "
        '(logger "ampctx"). New code: ampctx.amp.initialize(opt_level="O2").',
    )
    FP16_UTILS |= below(
        _prefix,
        "optimizer loss_scaler loss_scale overflow first_closure_call_this_step dynamic_loss_scale verbose state "
        "param_groups clip_grad_norm zero_grad backward step clip_master_grads state_dict load_state_dict "
        "_master_params_to_model_params",
        "supported",
    )
    FP16_UTILS |= below(
        _prefix,
        "fp16_groups fp32_from_fp16_groups fp32_from_fp32_groups all_fp16_params all_fp32_from_fp16_params "
        "all_fp32_from_fp32_params",
        "adapted",
        "Rebuilt from optimizer.param_groups on each access.",
    )
    FP16_UTILS |= below(
        _prefix, "update_master_grads", "adapted", "A parameter without a gradient gives its master none."
    )
    FP16_UTILS |= below(_prefix, "inspect_master_grad_data", "adapted", "Logs where apex printed.")


def _refused(note: str, still_in_apex: bool = False) -> Name:
    """``still_in_apex``: of apex after 2021. An apex without the module's extension refuses the import, too."""
    beside = " If an NVIDIA apex with this module is installed too, the module comes from there."
    return Name("refused", None, f"Use {note}.{beside if still_in_apex else ''}", still_in_apex)


# What apex puts on optimizers.
ON_OPTIMIZERS: dict[str, Name] = {
    **below("optimizer", "_amp_stash", "supported", "A live view: the names of AmpOptimizerState."),
    **below(
        "optimizer",
        "_prepare_amp_backward _post_amp_backward _master_params_to_model_params",
        "supported",
        "Exists from amp.initialize to amp.reset.",
    ),
    **below(
        "optimizer",
        "_lazy_init_maybe_master_weights _amp_lazy_init",
        "adapted",
        "initialize already creates the masters. This call syncs them with later changes to the model.",
    ),
}

# Whole modules: an entry stands for all names below it.
REFUSED: dict[str, Name] = {
    "apex.RNN": _refused("torch.nn.RNN, torch.nn.LSTM or torch.nn.GRU"),
    **{
        f"apex.RNN{module}.{name}": _refused(replacement)
        for module in ("", ".models")
        for name, replacement in {
            "LSTM": "torch.nn.LSTM",
            "GRU": "torch.nn.GRU",
            "ReLU": "torch.nn.RNN with nonlinearity='relu'",
            "Tanh": "torch.nn.RNN with nonlinearity='tanh'",
            "mLSTM": "torch.nn.LSTM; torch has no multiplicative LSTM",
        }.items()
    },
    "apex.pyprof": _refused("torch.profiler, or torch.cuda.nvtx with Nsight Systems"),
    "apex.reparameterization": _refused("torch.nn.utils.parametrizations.weight_norm"),
    "apex.reparameterization.remove_weight_norm": _refused("torch.nn.utils.parametrize.remove_parametrizations"),
    "apex.transformer": _refused(
        "Megatron Core (megatron.core), or torch.distributed.tensor.parallel and torch.distributed.pipelining", True
    ),
    "apex.transformer.functional": _refused("torch.nn.functional.softmax and scaled_dot_product_attention", True),
    "apex.transformer.layers": _refused("torch.nn.LayerNorm, or apex.normalization", True),
    "apex.transformer.amp.GradScaler": _refused(
        "ampctx.GradScaler with process_group, so that all ranks of the model agree on an overflow", True
    ),
    "apex.parallel.sync_batchnorm_kernel": _refused("apex.parallel.SyncBatchNorm"),
    "apex.parallel.optimized_sync_batchnorm_kernel": _refused("apex.parallel.SyncBatchNorm"),
    **{
        f"apex.contrib.{module}": _refused(replacement, True)
        for module, replacement in {
            "bottleneck": "torchvision.models.resnet.Bottleneck",
            "conv_bias_relu": "torch.nn.Conv2d and torch.nn.ReLU, which torch.compile fuses",
            "cudnn_gbn": "torch.nn.SyncBatchNorm with a process group",
            "fmha": "torch.nn.functional.scaled_dot_product_attention, with nested tensors if lengths differ",
            "focal_loss": "torchvision.ops.sigmoid_focal_loss",
            "gpu_direct_storage": "torch.cuda.gds.GdsFile",
            "group_norm": "torch.nn.GroupNorm, which takes channels_last input",
            "groupbn": "torch.nn.SyncBatchNorm on channels_last input",
            "index_mul_2d": "in1[index] * in2",
            "multihead_attn": "torch.nn.MultiheadAttention, or torch.nn.functional.scaled_dot_product_attention",
            "nccl_allocator": "torch.cuda.MemPool with the allocator of the NCCL process group",
            "nccl_p2p": "torch.distributed.batch_isend_irecv",
            "openfold_triton": "torch.nn.LayerNorm and torch.nn.functional.scaled_dot_product_attention",
            "peer_memory": "torch.distributed.batch_isend_irecv",
            "sparsity": "torch.sparse.to_sparse_semi_structured",
            "torchsched": "torch.compile",
            "transducer": "torchaudio.functional.rnnt_loss",
        }.items()
    },
}

NAMES: Mapping[str, Name] = MappingProxyType(
    AMP | ON_OPTIMIZERS | OPTIMIZERS | KERNELS | EXTENSIONS | PARALLEL | LAYERS | FP16_UTILS | REFUSED | MISSING
)


def lookup(name: str) -> Name | None:
    """The entry of ``name``, or of the refused module that contains it."""
    while name:
        entry = NAMES.get(name)
        if entry is not None:
            return entry
        name = name.rpartition(".")[0]
    return None


def refusal(name: str) -> str | None:
    """The error text for a call of ``name``; None unless it is refused."""
    entry = lookup(name)
    if entry is None or entry.status != "refused":
        return None
    return f"{name} is not supported by ampctx. {entry.note}"


def is_refused_at_import(name: str) -> bool:
    """Whether the import of ``name`` raises. False unless it is refused."""
    entry = lookup(name)
    return entry is not None and entry.at_import
