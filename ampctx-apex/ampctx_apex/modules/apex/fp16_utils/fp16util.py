"""Casts of a model to fp16, and the copies between fp16 weights and fp32 masters, for loops written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from ampctx_apex.checkpoints import split
from torch import Tensor, nn

# Private by name: see ampctx.casts.casting.
from torch.nn.modules.batchnorm import _BatchNorm

from ampctx import AmpValueError, foreach
from ampctx.foreach import FoundInf
from ampctx.spi import cast_model, set_dtype


class tofp16(nn.Module):
    """A layer that casts its input to fp16."""

    def forward(self, input: Tensor) -> Tensor:
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Casts every affine batch norm in ``module``, itself included, to fp32 in place; returns ``module``."""
    for child in module.modules():
        if isinstance(child, _BatchNorm) and child.affine is True:
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """``network`` in fp16, in place, but for affine batch norms, behind a layer that casts the input."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


@torch.no_grad()
def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating parameters, their gradients and buffers of ``module`` itself, not of its children, in place."""
    for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if t.is_floating_point():
            set_dtype(t, dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts ``network`` in place, as O2 does: affine batch norms are in fp32 afterwards. Returns it."""
    cast_model(network, dtype, keep_batchnorm_fp32=True, keep_statistics_fp32=False)
    return network


class FP16Model(nn.Module):
    """``network`` in fp16, in place, as ``convert_network`` casts it, with positional inputs cast to fp16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Tensor) -> Any:
        return self.network(*(t.half() for t in inputs))


def _check(model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool) -> None:
    if flat_master and len(master_params) != 1:
        raise AmpValueError(f"flat_master=True expects one master, master_params has {len(master_params)}")
    if not flat_master and len(model_params) != len(master_params):
        raise AmpValueError(f"model_params has {len(model_params)} tensors, master_params has {len(master_params)}")


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """The trainable parameters of ``model``, and fp32 masters with their values.

    With ``flat_master`` the second list holds one 1-D Parameter, all masters in a row, with a gradient of zeros;
    parameters may be of several dtypes, on one device.
    """
    model_params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    if flat_master:
        if not model_params:
            raise AmpValueError("flat_master=True: the model has no parameter with requires_grad")
        master = nn.Parameter(torch.cat([p.detach().float().reshape(-1) for p in model_params]))
        master.grad = torch.zeros_like(master)
        return model_params, [master]
    return model_params, [p.detach().to(torch.float32, copy=True).requires_grad_() for p in model_params]


def _grads_of_pairs(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of model parameters, and those of their masters that they are to be written to: made where there
    are none, None where the parameter has none. Of sparse ones the values, copied already."""
    model_grads, master_grads = [], []
    for p, master in pairs:
        if p.grad is None:
            master.grad = None
        elif p.grad.layout == torch.sparse_coo:
            master.grad = p.grad.coalesce().to(master.dtype)
            model_grads.append(master.grad.values())
            master_grads.append(master.grad.values())
        else:
            if master.grad is None or master.grad.layout != torch.strided:
                master.grad = torch.empty_like(master)
            model_grads.append(p.grad)
            master_grads.append(master.grad)
    return model_grads, master_grads


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies the gradients of ``model_params`` to the masters that ``prep_param_lists`` gave. No host sync.

    A parameter without a gradient leaves its master without one; in a flat master, with zeros.
    """
    _check(model_params, master_params, flat_master)
    if flat_master:
        master = master_params[0]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        if master.grad is None:
            master.grad = torch.empty_like(master)
        foreach.scale(grads, split(master.grad, model_params, "master_params[0]"), FoundInf(), 1.0)
        return
    foreach.scale(*_grads_of_pairs(zip(model_params, master_params, strict=True)), FoundInf(), 1.0)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies the masters' values to the model, rounded to nearest even. No host sync."""
    _check(model_params, master_params, flat_master)
    sources = [master.detach() for master in master_params]
    if flat_master:
        sources = split(sources[0], model_params, "master_params[0]")
    foreach.scale(sources, [p.detach() for p in model_params], FoundInf(), 1.0)


def to_python_float(t: Any) -> Any:
    """The number in a one-element tensor (a host sync), or the first element of anything else."""
    return t.item() if hasattr(t, "item") else t[0]
