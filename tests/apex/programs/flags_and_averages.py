import argparse
import time
from collections import OrderedDict
from contextlib import suppress
import torch
import torch.nn as nn

try:
    from apex import amp
    from apex.parallel import DistributedDataParallel as ApexDDP
    from apex.parallel import convert_syncbn_model

    has_apex = True
except ImportError:
    has_apex = False

parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
parser.add_argument("--clip-grad", type=float, default=0.3)
parser.add_argument("--distributed", action="store_true")


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    use_amp = False
    if has_apex and args.amp:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        use_amp = True
    if args.distributed:
        if has_apex and use_amp:
            model = ApexDDP(model, delay_allreduce=True)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model)
    loader = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(8)]
    loss_fn = nn.CrossEntropyLoss()
    try:
        for epoch in range(2):
            train_epoch(epoch, model, loader, optimizer, loss_fn, args, use_amp=use_amp)
            validate(model, loader, loss_fn)
    except KeyboardInterrupt:
        pass


def train_epoch(epoch, model, loader, optimizer, loss_fn, args, lr_scheduler=None, use_amp=False, model_ema=None):
    batch_time_m = AverageMeter()
    losses_m = AverageMeter()
    model.train()
    end = time.time()
    last_idx = len(loader) - 1
    for batch_idx, (input, target) in enumerate(loader):
        last_batch = batch_idx == last_idx
        output = model(input)
        loss = loss_fn(output, target)
        losses_m.update(loss.item(), input.size(0))
        print(losses_m.val)

        optimizer.zero_grad()
        if use_amp:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        if args.clip_grad is not None:
            torch.nn.utils.clip_grad_norm_(
                amp.master_params(optimizer) if use_amp else model.parameters(), args.clip_grad
            )
        optimizer.step()
        if model_ema is not None:
            model_ema.update(model)
        batch_time_m.update(time.time() - end)
        if last_batch or batch_idx % 4 == 0:
            lrl = [param_group["lr"] for param_group in optimizer.param_groups]
            print(sum(lrl) / len(lrl), losses_m.avg)
        if lr_scheduler is not None:
            lr_scheduler.step_update(num_updates=batch_idx, metric=losses_m.avg)
        end = time.time()
    return OrderedDict([("loss", losses_m.avg)])


def validate(model, loader, loss_fn):
    model.eval()
    with torch.no_grad():
        for input, target in loader:
            print(loss_fn(model(input), target).item())


if __name__ == "__main__":
    main()
