import sys
import logging
import torch
import torch.nn as nn
import apex
from apex.parallel import DistributedDataParallel as DDP

logger = logging.getLogger(__name__)


class Config:
    fp16 = "--fp16" in sys.argv
    n_accum = 3
    max_norm = 1.0
    world = 1


def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 20))


def main():
    cfg = Config()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if cfg.fp16:
        logger.info("using fp16")
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    if cfg.world > 1:
        model = DDP(model, message_size=10000000, delay_allreduce=False)
    loss_fct = nn.CrossEntropyLoss(ignore_index=-1)
    g = torch.Generator().manual_seed(2)
    data = [torch.randint(0, 20, (4, 12), generator=g) for _ in range(12)]
    for epoch in range(2):
        total = 0.0
        optimizer.zero_grad()
        for step, ids in enumerate(data):
            labels = ids.clone()
            labels[:, ::3] = -1
            prediction_scores = model(ids)
            masked_lm_loss = loss_fct(prediction_scores.view(-1, 20), labels.view(-1))
            loss = masked_lm_loss / cfg.n_accum
            if cfg.fp16:
                with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            total += loss.item()
            print(loss.item())
            if (step + 1) % cfg.n_accum == 0:
                if cfg.fp16:
                    grad_norm = torch.nn.utils.clip_grad_norm_(apex.amp.master_params(optimizer), cfg.max_norm)
                else:
                    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_norm)
                print("norm", float(grad_norm))
                for param_group in optimizer.param_groups:
                    param_group["lr"] = 0.01 * (1 - step / 100)
                optimizer.step()
                for param in model.parameters():
                    param.grad = None
        print("epoch", total)


if __name__ == "__main__":
    main()
