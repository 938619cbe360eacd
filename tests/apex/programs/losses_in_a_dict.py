import torch
from torch import nn
from apex import amp


class Meter:
    def __init__(self):
        self.values = []

    def update(self, **kwargs):
        self.values += [float(v) for v in kwargs.values()]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.cls, self.box = nn.Linear(16, 3), nn.Linear(16, 4)

    def forward(self, images, targets):
        features = torch.relu(self.body(images))
        labels, boxes = targets
        return {
            "loss_cls": nn.functional.cross_entropy(self.cls(features), labels),
            "loss_box": nn.functional.smooth_l1_loss(self.box(features), boxes),
        }


def reduce_loss_dict(loss_dict):
    return {k: v.detach() for k, v in loss_dict.items()}


def do_train(model, data_loader, optimizer, scheduler, device, checkpointer=None):
    meters = Meter()
    max_iter = len(data_loader)
    model.train()
    for iteration, (images, targets) in enumerate(data_loader):
        iteration = iteration + 1
        images = images.to(device)
        targets = [target.to(device) for target in targets]

        loss_dict = model(images, targets)

        losses = sum(loss for loss in loss_dict.values())

        loss_dict_reduced = reduce_loss_dict(loss_dict)
        losses_reduced = sum(loss for loss in loss_dict_reduced.values())
        meters.update(loss=losses_reduced, **loss_dict_reduced)

        optimizer.zero_grad()
        with amp.scale_loss(losses, optimizer) as scaled_losses:
            scaled_losses.backward()
        optimizer.step()
        scheduler.step()
        print(losses.item(), iteration / max_iter)
        if iteration % 4 == 0 and checkpointer is not None:
            checkpointer.save("model_{:07d}".format(iteration))
    print(sum(meters.values))


def train(cfg, local_rank=0, distributed=False):
    torch.manual_seed(0)
    model = Detector()
    device = torch.device("cpu")
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    use_mixed_precision = cfg["dtype"] == "float16"
    amp_opt_level = "O1" if use_mixed_precision else "O0"
    model, optimizer = amp.initialize(model, optimizer, opt_level=amp_opt_level)
    if distributed:
        model = torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[local_rank],
            output_device=local_rank,
        )
    data = [(torch.randn(8, 8), [torch.randint(0, 3, (8,)), torch.randn(8, 4)]) for _ in range(10)]
    do_train(model, data, optimizer, scheduler, device)
    return model


train({"dtype": "float16"})
