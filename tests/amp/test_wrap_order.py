"""Wrap x order of initialize x level: a wrapped model trains and evaluates as the plain one, or is refused by name."""

from __future__ import annotations

import pytest
import torch
from kit import LEVELS, OPTIMIZERS, Net, assert_same, goes_on_where_dynamo_ends, start, train
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ampctx import AmpError
from ampctx.distributed import fully_shard, mixed_precision_policy

pytestmark = [pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that"), goes_on_where_dynamo_ends]
X = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def loss_of(model, step):
    return model(X).float().square().mean()


class Averaging(nn.parallel.DistributedDataParallel):
    """``averaged``: the sizes of the buckets of gradients that it has averaged over the ranks."""

    def __init__(self, model):
        super().__init__(model)
        self.averaged = []
        self.register_comm_hook(self.averaged, _noted)


def _noted(sizes, bucket):
    sizes.append(bucket.buffer().numel())
    return allreduce_hook(None, bucket)


def compiled_in_place(model, level, mesh):
    model.compile(backend="eager")
    return model


def sharded(model, level, mesh):
    for module in (model.conv, model.hidden, model.head):
        given = mixed_precision_policy("O0" if level == "O3" else level)
        fsdp.fully_shard(module, mesh=mesh, mp_policy=given)
    return fsdp.fully_shard(model, mesh=mesh)  # of a norm, which stays fp32


WRAPS = {
    "DistributedDataParallel": lambda model, level, mesh: Averaging(model),
    "DataParallel": lambda model, level, mesh: nn.DataParallel(model),
    # aot_eager goes through the dispatcher as inductor does, eager stops at dynamo's graph.
    "torch.compile": lambda model, level, mesh: torch.compile(
        model, backend="aot_eager" if level in ("O1", "O2") else "eager", fullgraph=True
    ),
    "Module.compile": compiled_in_place,
    "fully_shard": sharded,
    "ampctx's fully_shard": lambda model, level, mesh: fully_shard(
        model, level, mesh=mesh, units=[nn.Conv2d, nn.Linear]
    ),
}
# When the model is wrapped, and what ``initialize`` is given.
ORDERS = ("before, wrapper", "before, model", "after")
IN_PLACE = ("Module.compile", "fully_shard", "ampctx's fully_shard")  # the wrapper is the model
ROWS = [(wrap, order) for wrap in WRAPS for order in ORDERS[wrap in IN_PLACE :]]


def refusal(wrap, order, level):
    if wrap in ("DistributedDataParallel", "DataParallel") and order == "before, wrapper":
        return f"Incoming model is an instance of torch.nn.parallel.{wrap}. .*amp.initialize on the inner model"
    if wrap == "DistributedDataParallel" and order == "before, model" and level in ("O2", "O3", "O5"):
        return "the model was wrapped before amp.initialize or amp.reset cast its weights"
    if "ampctx" in wrap and level == "O3":
        return "O3 keeps no fp32 weights, and shards are fp32"
    if "fully_shard" in wrap and order == "after":
        return "the model was sharded after amp.initialize"
    if wrap == "fully_shard" and level == "O3":
        return "O3 with master_weights=False does not work under fully_shard"
    return None


def model():
    """Of weights that 16 bits hold: shards start from these, masters in a process group from rounded ones."""
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().half())
    return model


def evaluated(model):
    with torch.no_grad():
        found = model.eval()(X)
    model.train()
    return found


@pytest.mark.full(but=12)
@pytest.mark.parametrize("name", ["FusedAdam", "SGD-foreach"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("wrap", "order"), ROWS)
def test_a_wrapped_model_trains_as_the_plain_one_or_is_refused(session, mesh, wrap, order, level, name):
    torch.compiler.reset()
    inner = model()

    def run():
        wrapped = WRAPS[wrap](inner, level, mesh) if order != "after" else inner
        if "compile" in wrap:
            evaluated(wrapped)
        optimizer = OPTIMIZERS[name](inner.parameters())
        given = wrapped if order == "before, wrapper" else inner
        session.initialize(given, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        wrapped = WRAPS[wrap](inner, level, mesh) if order == "after" else wrapped
        return wrapped, train(session, wrapped, optimizer, 3, loss=loss_of)

    if message := refusal(wrap, order, level):
        with pytest.raises(AmpError, match=message):
            run()
        return
    wrapped, losses = run()
    if isinstance(wrapped, Averaging):
        assert sum(wrapped.averaged) == 3 * sum(p.numel() for p in inner.parameters())
    found = evaluated(wrapped)
    session.reset()
    assert torch.equal(evaluated(wrapped), evaluated(inner))
    plain, optimizer = start(session, level, name, model(), loss_scale=64.0)
    assert losses == train(session, plain, optimizer, 3, loss=loss_of)
    assert_same(found, evaluated(plain))
