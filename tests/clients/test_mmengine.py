"""mmengine: ``ApexOptimWrapper`` under ``BaseModel.train_step``, as its runner uses them."""

import pytest
import torch
from apex import amp
from mmengine.model import BaseModel
from mmengine.optim import ApexOptimWrapper, build_optim_wrapper
from training import FIRST_SCALE, assert_same_weights, batches, by_hand, loss_of, mlp, on_levels, sgd, weights

from ampctx import amp as library_amp


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, y, mode="tensor"):
        output = self.net(x)
        return {"loss": loss_of(output, y)} if mode == "loss" else output


def wrapper_of(model, level, **options):
    config = {
        "type": "ApexOptimWrapper",
        "opt_level": level,
        "verbosity": 0,
        "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9},
        **options,
    }
    wrapper = build_optim_wrapper(model, config)
    assert isinstance(wrapper, ApexOptimWrapper)
    return wrapper


def run(model, wrapper, data):
    """Returns the losses. The first step of a wrapper calls ``amp.initialize``."""
    model.train()
    return [model.train_step({"x": x, "y": y}, wrapper)["loss"].item() for x, y in data]


@on_levels
@pytest.mark.parametrize(
    ("options", "loop"),
    [
        ({}, {}),
        ({"clip_grad": {"max_norm": 0.05}}, {"max_norm": 0.05}),
        ({"accumulative_counts": 3}, {"accumulate": 3}),
    ],
    ids=["plain", "clipping", "accumulation"],
)
def test_steps_do_what_the_loop_does(level, options, loop):
    expected, model, data = Model(), Model(), batches(12)

    def loss(model, x, y):
        return model(x, y, mode="loss")["loss"]

    losses, after = by_hand(expected, sgd(expected), data, level, loss=loss, **loop)
    assert run(model, wrapper_of(model, level, **options), data) == pytest.approx(losses)
    assert_same_weights(model, after)


@pytest.mark.parametrize("load", ["before-the-first-step", "after-the-first-step"])
def test_a_resumed_run_ends_like_an_uninterrupted_one(load):
    """Before the first step ``amp`` is not initialized: the wrapper keeps the scales until then."""
    data = batches(6, overflow_at=1)
    model = Model()
    wrapper = wrapper_of(model, "O1")
    run(model, wrapper, data[:3])
    state = wrapper.state_dict()
    assert state["apex_amp"]["loss_scaler0"] == {"loss_scale": FIRST_SCALE / 2, "unskipped": 1}
    saved = weights(model)
    state = {**state, "state": {k: {n: torch.clone(t) for n, t in v.items()} for k, v in state["state"].items()}}
    run(model, wrapper, data[3:])
    expected = weights(model)
    library_amp.reset()

    model = Model()
    wrapper = wrapper_of(model, "O1")
    if load == "after-the-first-step":
        run(model, wrapper, batches(1))
    model.load_state_dict(saved)
    wrapper.load_state_dict(state)
    run(model, wrapper, data[3:])
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": FIRST_SCALE / 2, "unskipped": 4}
    assert_same_weights(model, expected)
