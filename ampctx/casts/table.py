"""The cast table of O1 and O4: the rule of each aten overload, taken from torch's CUDA autocast.

torch's own kernels apply it on CUDA, and on the CPU for about half of the ops; ``cpu.py`` adds the rest. Ops outside
the table follow their inputs and torch's type promotion. On the CPU, torch's autocast also computes some ops in fp32
that CUDA leaves in 16 bits (linalg, fft, padding, 3-d pooling).
"""

from __future__ import annotations

from ampctx.casts.arguments import Rule

NAMES: dict[Rule, str] = {
    # Matrix products and convolutions, which accumulate in fp32. Recurrent layers: on CUDA torch lists their one cuDNN
    # op; without these entries the CPU would cast only their weights.
    "half": """
        addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution einsum gru_cell linalg_multi_dot linalg_vecdot
        linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
        gru.data gru.input lstm.data lstm.input rnn_relu.data rnn_relu.input rnn_tanh.data rnn_tanh.input
    """,
    # Exponentials and powers leave the range of fp16; sums, norms and losses lose digits.
    "float": """
        acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cumprod cumsum
        dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div l1_loss
        layer_norm linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log log10 log1p log2
        log_softmax.int logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
        native_layer_norm nll_loss nll_loss2d norm.Scalar norm.ScalarOpt_dim nuclear_norm nuclear_norm.dim pdist
        poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod prod.dim_int reciprocal renorm rms_norm
        rsqrt sinh smooth_l1_loss soft_margin_loss softmax.int softplus sum sum.dim_IntList tan triplet_margin_loss
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
        upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """,
    # Ops that refuse mixed dtypes.
    "promote": """
        addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
    """,
}
TABLE: dict[str, Rule] = {name: rule for rule, names in NAMES.items() for name in names.split()}
