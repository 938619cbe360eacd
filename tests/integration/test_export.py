"""torch.export of models under amp: the program computes what the model does, with amp and without it."""

import io

import pytest
import torch
from kit import Net, assert_same, every_level, goes_on_where_dynamo_ends, start, train

WITH_CASTS_PER_OP = ("O1", "O4")
X = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))
# torch's own decompositions of torch's own treespecs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),  # torch 2.11 as it loads a program
]


def trained(session, level):
    model, optimizer = start(session, level, "FusedSGD", Net(), loss_scale=8.0)
    train(session, model, optimizer, loss=lambda model, _: model(X).float().square().sum())
    return model.eval(), optimizer  # which holds the masters


def exported(model):
    shapes = {"x": {0: torch.export.Dim("batch", min=2)}}
    return torch.export.export(model, (X,), dynamic_shapes=shapes, strict=False)


def in_another_process(program):
    """What a file of the program loads as."""
    file = io.BytesIO()
    torch.export.save(program, file)
    return torch.export.load(io.BytesIO(file.getvalue())).module()


@goes_on_where_dynamo_ends
@every_level
def test_the_program_computes_what_the_model_does_also_where_amp_is_not(session, level):
    """Casts per op are torch's autocast around the model, which export leaves outside; decompositions take them in."""
    model, _optimizer = trained(session, level)
    expected, program = model(X), exported(model)
    for n in (5, 2):
        assert_same(program.module()(X[:n]), model(X[:n]))
    if level in WITH_CASTS_PER_OP:
        program = program.run_decompositions({})
    loaded = in_another_process(program)
    session.reset()
    assert_same(loaded(X), expected)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_in_fp32_from_the_masters_while_training_goes_on(session, level):
    """``master_model`` takes amp off one model and leaves the run alone."""
    model, _optimizer = trained(session, level)
    with session.disable_casts():
        copy = session.master_model(model)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in copy.modules())
        loaded = in_another_process(exported(copy))
    before = model(X)
    assert_same(model(X), before)
    session.reset()
    assert_same(loaded(X), model(X))


def test_after_reset_a_program_has_weights_of_another_type(session):
    """It shares them with the model: to be saved before."""
    model, _optimizer = trained(session, "O2")
    program = exported(model)
    session.reset()
    with pytest.raises(RuntimeError, match="should be the same"):
        program.module()(X)
