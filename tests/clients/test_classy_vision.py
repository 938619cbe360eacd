"""Classy Vision: ``ClassificationTask`` with apex as its amp type, and LARC by its SGD.

At O1 alone: at each step the task compares the parameters in the optimizer with those of the model, and at O2 they are
masters, here as in apex.
"""

import pytest
import torch
from apex.parallel.LARC import LARC
from classy_vision.dataset import ClassyDataset
from classy_vision.generic.util import apex_available
from classy_vision.hooks import ClassyHook
from classy_vision.losses import ClassyLoss
from classy_vision.models import ClassyModel
from classy_vision.optim import SGD
from classy_vision.tasks import ClassificationTask
from classy_vision.tasks.classification_task import AmpType
from classy_vision.trainer import LocalTrainer
from training import LR, assert_the_second_is_skipped, batches, by_hand, loss_of, mlp, scale, sgd


class Model(ClassyModel):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x)


class Loss(ClassyLoss):
    def forward(self, output, target):
        return loss_of(output, target)


class Data(ClassyDataset):
    def __init__(self, data):
        samples = [{"input": x, "target": y} for inputs, targets in data for x, y in zip(inputs, targets, strict=True)]
        super().__init__(samples, batchsize_per_replica=8, shuffle=False, transform=None, num_samples=None)

    def iterator(self, *args, **kwargs):
        """Without worker processes."""
        return super().iterator(*args, **{**kwargs, "num_workers": 0, "multiprocessing_context": None})


class Notes(ClassyHook):
    on_start = on_phase_start = on_phase_end = on_end = ClassyHook._noop

    def __init__(self):
        super().__init__()
        self.losses, self.steps, self.scales = [], [], []

    def on_step(self, task):
        self.losses.append(task.last_batch.loss.item())
        self.steps.append([p.detach().clone() for p in task.base_model.parameters()])
        self.scales.append(scale())


def task_of(data, larc=False):
    notes = Notes()
    optimizer = SGD(lr=LR, momentum=0.9, use_larc=larc, larc_config={"trust_coefficient": 0.02})
    task = ClassificationTask().set_model(Model()).set_loss(Loss()).set_meters([]).set_num_epochs(1)
    task.set_dataset(Data(data), "train").set_optimizer(optimizer).set_hooks([notes]).set_use_gpu(False)
    # What set_amp_args leaves on the task; it insists on a GPU.
    task.amp_args, task.amp_type = {"opt_level": "O1", "verbosity": 0}, AmpType.APEX
    return task, notes


def batches_with_a_steep_one():
    """The second has a finite loss, as the task wants it; its scaled gradient is not finite."""
    data = batches(4)
    data[1][1][0, 0] = 1e4
    return data


def test_classy_vision_finds_apex():
    assert apex_available


OPTIONS = {"plain": {}, "clipping": {"max_norm": 0.05}, "accumulation": {"accumulate": 2}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("larc", [False, True], ids=["sgd", "larc"])
def test_the_task_does_what_the_loop_does(larc, options):
    """LARC goes where an optimizer is expected: into ``initialize`` and ``scale_loss``."""
    expected, data = mlp(), batches(12)
    optimizer = LARC(sgd(expected), trust_coefficient=0.02) if larc else sgd(expected)
    losses, after = by_hand(expected, optimizer, data, "O1", **options)
    task, notes = task_of(data, larc)
    if "max_norm" in options:
        task.set_clip_grad_norm(options["max_norm"])
    if "accumulate" in options:
        task.set_simulated_global_batchsize(8 * options["accumulate"])
    LocalTrainer().train(task)
    assert isinstance(task.optimizer.optimizer, LARC) == larc
    assert notes.losses == pytest.approx(losses)
    # The task has the parameters in another order, in which their norm is summed for clipping.
    torch.testing.assert_close(dict(task.base_model.net.state_dict()), after)


@pytest.mark.parametrize("larc", [False, True], ids=["sgd", "larc"])
def test_an_overflow_skips_the_step_and_halves_the_scale(larc):
    task, notes = task_of(batches_with_a_steep_one(), larc)
    LocalTrainer().train(task)
    assert_the_second_is_skipped(notes.scales, notes.steps)
