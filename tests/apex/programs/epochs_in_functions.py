import argparse
import torch
import torch.nn as nn

try:
    from apex.parallel import DistributedDataParallel as DDP
    from apex import amp
except ImportError:
    raise ImportError("apex is missing")


def main():
    global args
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--distributed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    if args.sync_bn:
        import apex

        print("synchronized")
        model = apex.parallel.convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)

    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss()
    loader = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(8)]
    for epoch in range(2):
        train(loader, model, criterion, optimizer, epoch)
        validate(loader, model, criterion)


def train(train_loader, model, criterion, optimizer, epoch):
    losses = AverageMeter()
    top1 = AverageMeter()
    model.train()
    for i, (input, target) in enumerate(train_loader):
        adjust_learning_rate(optimizer, epoch, i, len(train_loader))
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if i % 2 == 0:
            prec1, prec5 = accuracy(output.data, target, topk=(1, 2))
            losses.update(loss.item(), input.size(0))
            top1.update(prec1.item(), input.size(0))
            print(losses.val, losses.avg, top1.val)


def validate(val_loader, model, criterion):
    model.eval()
    for input, target in val_loader:
        with torch.no_grad():
            output = model(input)
            print(criterion(output, target).item())


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def adjust_learning_rate(optimizer, epoch, step, len_epoch):
    for group in optimizer.param_groups:
        group["lr"] = 0.3 * 0.5**epoch


def accuracy(output, target, topk=(1,)):
    _, pred = output.topk(max(topk), 1, True, True)
    correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
    return [correct[:k].reshape(-1).float().sum(0, keepdim=True) for k in topk]


if __name__ == "__main__":
    main()
