"""Megatron Core: its linear layer with ``gradient_accumulation_fusion``, and its layer norms over apex's."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.fusions import fused_layer_norm
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.nn import functional as F


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def config(hidden_size=8, **options):
    return TransformerConfig(
        num_layers=1, hidden_size=hidden_size, num_attention_heads=2, use_cpu_initialization=True, **options
    )


def test_it_finds_the_extension():
    assert layers._grad_accum_fusion_available
    assert fused_layer_norm.HAVE_FUSED_LAYER_NORM
    assert fused_layer_norm.HAVE_PERSIST_LAYER_NORM


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_gradients_accumulate_in_main_grad(one_rank, dtype, grad_dtype):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 7).to(dtype))
    weight.main_grad = torch.zeros(5, 7, dtype=grad_dtype)
    reference = weight.detach().double().requires_grad_()
    for _ in range(2):
        x = torch.randn(3, 2, 7).to(dtype).requires_grad_()
        out = layers.linear_with_grad_accumulation_and_async_allreduce(
            input=x,
            weight=weight,
            bias=None,
            gradient_accumulation_fusion=True,
            allreduce_dgrad=False,
            sequence_parallel=False,
        )
        upstream = torch.randn(out.shape).to(dtype)
        out.backward(upstream)
        wide = x.detach().double().requires_grad_()
        F.linear(wide, reference).backward(upstream.double())
        bound = 16.0 * torch.finfo(dtype).eps
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=bound, atol=bound)
    assert weight.grad is None
    bound = 16.0 * torch.finfo(grad_dtype).eps
    torch.testing.assert_close(weight.main_grad.double(), reference.grad, rtol=bound, atol=bound)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize(("hidden_size", "persistent"), [(8, False), (1024, True)])
def test_layer_norms_are_torchs(hidden_size, persistent, memory_efficient, zero_centered):
    given = config(
        hidden_size,
        persist_layer_norm=persistent,
        memory_efficient_layer_norm=memory_efficient,
        layernorm_zero_centered_gamma=zero_centered,
    )
    norm, reference = fused_layer_norm.FusedLayerNorm(given, hidden_size), nn.LayerNorm(hidden_size)
    assert norm.persist_layer_norm == persistent
    x = torch.randn(3, 2, hidden_size, requires_grad=True)
    wide = x.detach().clone().requires_grad_()
    out, wanted = norm(x), reference(wide)
    torch.testing.assert_close(out, wanted)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    wanted.backward(upstream)
    torch.testing.assert_close(x.grad, wide.grad)
    torch.testing.assert_close(norm.weight.grad, reference.weight.grad)
