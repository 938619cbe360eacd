"""The names of apex's layers, losses and extensions. Data only."""

from __future__ import annotations

from ampctx_apex.name import Name, below

LAYERS: dict[str, Name] = {
    "apex.normalization": Name("supported"),
    **{
        f"apex.normalization{module}.{name}": entry
        for module in ("", ".fused_layer_norm")
        for name, entry in {
            "FusedLayerNorm": Name("supported", None, "torch.nn.LayerNorm, whose output is fp32 under autocast"),
            "FusedRMSNorm": Name("supported", None, "torch.nn.RMSNorm, with eps=1e-5 where none is given"),
            "MixedFusedLayerNorm": Name("supported", None, "torch.nn.LayerNorm, and .to(weight.dtype)"),
            "MixedFusedRMSNorm": Name("supported", None, "torch.nn.RMSNorm with eps=1e-5, and .to(weight.dtype)"),
        }.items()
    },
    **{
        f"apex.normalization.fused_layer_norm.{name}": Name("supported", None, f"torch.nn.functional.{target}")
        for target, names in {
            "layer_norm": (
                "fused_layer_norm",
                "fused_layer_norm_affine",
                "mixed_dtype_fused_layer_norm_affine",
                "FusedLayerNormFunction",
                "FusedLayerNormAffineFunction",
                "FusedLayerNormAffineMixedDtypesFunction",
            ),
            "rms_norm": (
                "fused_rms_norm",
                "fused_rms_norm_affine",
                "mixed_dtype_fused_rms_norm_affine",
                "manual_rms_norm",
                "FusedRMSNormFunction",
                "FusedRMSNormAffineFunction",
                "FusedRMSNormAffineMixedDtypesFunction",
            ),
        }.items()
        for name in names
    },
    **below("apex._autocast_utils", "_cast_if_autocast_enabled", "supported", "On any device: each tensor's own."),
    **below("apex._autocast_utils", "_get_autocast_dtypes _get_current_dtype", "supported", "On any device."),
    **{
        f"{module}.{name}": Name("supported", None, "torch.nn.Linear and torch.nn.ReLU or Sigmoid")
        for module in ("apex.mlp", "apex.mlp.mlp")
        for name in ("MLP", "MlpFunction", "mlp_function")
    },
    **{
        f"{module}.{name}": entry
        for module in ("apex.fused_dense", "apex.fused_dense.fused_dense")
        for name, entry in {
            "FusedDense": Name(
                "adapted",
                None,
                "Initializes its parameters; apex left them uninitialized. For new code: torch.nn.Linear.",
            ),
            "FusedDenseGeluDense": Name(
                "adapted",
                None,
                "Initializes its parameters; apex left them uninitialized. "
                "For new code: torch.nn.Linear, torch.nn.GELU(approximate='tanh'), torch.nn.Linear.",
            ),
            "FusedDenseFunc": Name("supported", None, "torch.nn.functional.linear"),
            "DenseNoBiasFunc": Name("supported", None, "torch.nn.functional.linear"),
            "FusedDenseGeluDenseFunc": Name("supported", None, "torch.nn.functional.linear and gelu"),
            "_fused_dense": Name("supported", "torch.nn.functional.linear"),
            "fused_dense_function": Name("supported", "torch.nn.functional.linear"),
            "_dense_no_bias": Name("supported", "torch.nn.functional.linear"),
            "dense_no_bias_function": Name("supported", "torch.nn.functional.linear"),
            "_fused_dense_gelu_dense": Name("supported", None, "torch.nn.functional.linear and gelu"),
            "fused_dense_gelu_dense_function": Name("supported", None, "torch.nn.functional.linear and gelu"),
        }.items()
    },
    "apex.contrib.clip_grad.clip_grad_norm_": Name("supported", "ampctx.clip_grad_norm_"),
    "apex.contrib.clip_grad.clip_grad.clip_grad_norm_": Name("supported", "ampctx.clip_grad_norm_"),
    **{
        f"apex.contrib.xentropy{module}.SoftmaxCrossEntropyLoss": Name(
            "supported",
            None,
            "torch.nn.functional.cross_entropy(logits.float(), labels, reduction='none', ignore_index=padding_idx, "
            "label_smoothing=smoothing)",
        )
        for module in ("", ".softmax_xentropy")
    },
    **{
        f"apex.contrib.layer_norm.{name}": Name("supported", None, "torch.nn.LayerNorm, and .to(weight.dtype)")
        for name in (
            "FastLayerNorm",
            "layer_norm.FastLayerNorm",
            "layer_norm.FastLayerNormFN",
            "layer_norm._fast_layer_norm",
        )
    },
}

_NORM = "On torch's ops, on any device. For new code: torch.nn.functional.layer_norm or rms_norm, which autograd sees."
# Compiled modules of apex besides amp_C and apex_C.
EXTENSIONS: dict[str, Name] = {
    "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32": Name(
        "supported", None, "On torch's matmul, on any device. Megatron-LM's gradient_accumulation_fusion works with it."
    ),
    "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16": Name(
        "supported", None, "On torch's matmul, on any device. Megatron-LM's gradient_accumulation_fusion works with it."
    ),
    **below(
        "fused_layer_norm_cuda",
        "forward forward_affine forward_affine_mixed_dtypes backward backward_affine rms_forward rms_forward_affine "
        "rms_forward_affine_mixed_dtypes rms_backward rms_backward_affine",
        "supported",
        _NORM,
    ),
    **below("fused_mix_prec_layer_norm_cuda", "forward_affine backward_affine", "supported", _NORM),
    "fast_layer_norm.ln_fwd": Name("supported", None, _NORM),
    "fast_layer_norm.ln_bwd": Name("adapted", None, "The two workspaces in its result are None."),
    "xentropy_cuda.forward": Name(
        "adapted", None, "Both results are fp32, or fp64 for fp64 logits. A negative label has a loss of 0."
    ),
    "xentropy_cuda.backward": Name("supported", None, "On torch's ops, on any device."),
    "fused_adam_cuda.adam": Name("adapted", None, "mode 0, eps_inside_sqrt, raises."),
    "fused_adam_cuda.adam_mt": Name("adapted", None, "mode 0, eps_inside_sqrt, raises."),
}

# What neither ampctx's modules nor its refusals have: the import, or the attribute, fails as Python's own.
MISSING: dict[str, Name] = {
    name: Name("missing", None, f"Use {replacement}.")
    for names, replacement in {
        "syncbn": "apex.parallel.SyncBatchNorm",
        "mlp_cuda": "apex.mlp",
        "fused_dense_cuda": "apex.fused_dense",
        "fused_lamb_cuda": "apex.optimizers.FusedLAMB",
        "distributed_adam_cuda distributed_lamb_cuda": "torch.distributed.fsdp",
        "scaled_softmax_cuda scaled_masked_softmax_cuda scaled_upper_triang_masked_softmax_cuda "
        "generic_scaled_masked_softmax_cuda": "torch.nn.functional.softmax or scaled_dot_product_attention; "
        "Megatron-LM has --no-masked-softmax-fusion",
        "fused_rotary_positional_embedding": "torch's ops; Megatron-LM has --no-rope-fusion",
        "fmhalib fast_multihead_attn": "torch.nn.functional.scaled_dot_product_attention",
        "bnp cudnn_gbn_lib": "torch.nn.SyncBatchNorm on channels_last input",
        "group_norm_cuda group_norm_v2_cuda": "torch.nn.GroupNorm, which takes channels_last input",
        "focal_loss_cuda": "torchvision.ops.sigmoid_focal_loss",
        "fused_index_mul_2d": "in1[index] * in2",
        "fast_bottleneck": "torchvision.models.resnet.Bottleneck",
        "fused_conv_bias_relu": "torch.nn.Conv2d and torch.nn.ReLU, which torch.compile fuses",
        "transducer_joint_cuda transducer_loss_cuda": "torchaudio.functional.rnnt_loss",
        "peer_memory_cuda nccl_p2p_cuda": "torch.distributed.batch_isend_irecv",
        "fused_adam_cuda.reversible_adam fused_adam_cuda.maybe_adam_undo fused_adam_cuda.maybe_cast "
        "fused_adam_cuda.maybe_cast_mt fused_adam_cuda.strided_check_finite": "fused_adam_cuda.adam behind a check of "
        "the gradients",
        "apex.normalization.fused_layer_norm.fused_layer_norm_affine_fwd "
        "apex.normalization.fused_layer_norm.fused_layer_norm_affine_bwd "
        "apex.normalization.fused_layer_norm.fused_rms_norm_affine_fwd "
        "apex.normalization.fused_layer_norm.fused_rms_norm_affine_bwd": "the function of that name without its end",
        "apex.normalization.fused_layer_norm.supports_custom_op": "torch.library.custom_op",
        "apex.fp16_utils.fp16util.backwards_debug_hook": "torch.autograd.detect_anomaly",
    }.items()
    for name in names.split()
}
