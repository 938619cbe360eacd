"""A training program for apex, unchanged: it has no ``import ampctx``.

    ampctx-apex run examples/apex_digits.py
    torchrun --nproc-per-node 2 -m ampctx_apex run examples/apex_digits.py --sync-bn

Without ampctx-apex the import fails: apex removed apex.amp in May 2025. Model and data are those of shared.py.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from apex import amp
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import convert_syncbn_model
from shared import accuracy, batches, load_digits, make_model


def parse_args():
    parser = argparse.ArgumentParser(description="Digits with apex")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--sync-bn", action="store_true", help="use apex's synchronized batch norm")
    parser.add_argument("--opt-level", type=str, default="O2")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--checkpoint", type=str, default=None)
    parser.add_argument("--resume", type=str, default=None)
    return parser.parse_args()


def main():
    args = parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args.distributed = args.world_size > 1
    args.rank = int(os.environ.get("RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.distributed:
        torch.distributed.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")

    torch.manual_seed(0)
    images, labels, test_images, test_labels = load_digits(device)
    model = make_model()
    if args.sync_bn:
        model = convert_syncbn_model(model)
    model = model.to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.005, weight_decay=5e-4)

    # If --keep-batchnorm-fp32 or --loss-scale is None, the opt level decides.
    options = {"keep_batchnorm_fp32": args.keep_batchnorm_fp32, "loss_scale": args.loss_scale}
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, **options)
    if args.distributed:
        model = DDP(model)

    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        start = checkpoint["epoch"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])

    for epoch in range(start, args.epochs):
        train(args, model, optimizer, images, labels, epoch)
        result = accuracy(model, test_images, test_labels)
        if args.rank == 0:
            scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
            print(f"epoch {epoch + 1}: test accuracy {result:.2f}% | loss scale {scale:g}")
            if args.checkpoint:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
                torch.save({"epoch": epoch + 1, **state}, args.checkpoint)
    if args.distributed:
        torch.distributed.destroy_process_group()


def train(args, model, optimizer, images, labels, epoch):
    for inputs, targets in batches(images, labels, args.batch_size, epoch, args.rank, args.world_size):
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()


if __name__ == "__main__":
    main()
