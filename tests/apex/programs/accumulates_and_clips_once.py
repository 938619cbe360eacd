import argparse
import random
import torch
from torch import nn

try:
    from apex import amp

    _has_apex = True
except ImportError:
    _has_apex = False


def is_apex_available():
    return _has_apex


from torch.optim.lr_scheduler import LambdaLR


def train(args, batches, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = LambdaLR(optimizer, lambda s: 1.0 / (1 + s))
    if args.fp16:
        if not is_apex_available():
            raise ImportError("apex is missing: --fp16 needs it")
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)

    if args.n_gpu > 1:
        model = torch.nn.DataParallel(model)

    if args.local_rank != -1:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.local_rank])

    global_step = 0
    tr_loss = 0.0
    model.zero_grad()
    for _ in range(args.epochs):
        for step, batch in enumerate(batches):
            model.train()
            batch = tuple(t.to(args.device) for t in batch)
            inputs = {"x": batch[0], "labels": batch[1]}
            outputs = model(**inputs)
            loss = outputs[0]
            if args.n_gpu > 1:
                loss = loss.mean()  # of the devices
            if args.gradient_accumulation_steps > 1:
                loss = loss / args.gradient_accumulation_steps

            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()

            tr_loss += loss.item()
            print(loss.item())
            if (step + 1) % args.gradient_accumulation_steps == 0:
                if args.fp16:
                    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)

                optimizer.step()
                scheduler.step()
                model.zero_grad()
                global_step += 1
                if args.local_rank in [-1, 0] and args.logging_steps > 0 and global_step % args.logging_steps == 0:
                    evaluate(args, model, batches)
            if args.max_steps > 0 and global_step > args.max_steps:
                break
    return global_step, tr_loss / global_step


def evaluate(args, model, batches):
    model.eval()
    with torch.no_grad():
        print(sum(model(x, labels=y)[0].item() for x, y in batches) / len(batches))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x, labels=None):
        logits = self.body(x)
        return (nn.functional.cross_entropy(logits, labels), logits)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--fp16_opt_level", type=str, default="O1")
    args = parser.parse_args()
    args.__dict__.update(
        epochs=2,
        device="cpu",
        n_gpu=0,
        local_rank=-1,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=0.05,
        logging_steps=2,
        max_steps=-1,
    )
    torch.manual_seed(0)
    random.seed(0)
    batches = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(6)]
    train(args, batches, Net())


if __name__ == "__main__":
    main()
