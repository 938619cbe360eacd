import torch
import torch.nn as nn
import apex
from apex.parallel import DistributedDataParallel as DDP


class Config:
    n_accum = 3
    max_norm = 1.0
    world = 1


def main():
    cfg = Config()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    if cfg.world > 1:
        model = DDP(model, message_size=10000000, delay_allreduce=False)
    loss_fct = nn.CrossEntropyLoss(ignore_index=-1)
    g = torch.Generator().manual_seed(2)
    data = [torch.randint(0, 20, (4, 12), generator=g) for _ in range(12)]
    for epoch in range(2):
        optimizer.zero_grad()
        for step, ids in enumerate(data):
            labels = ids.clone()
            labels[:, ::3] = -1
            loss = loss_fct(model(ids).view(-1, 20), labels.view(-1)) / cfg.n_accum
            with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            print(loss.item())
            if (step + 1) % cfg.n_accum == 0:
                grad_norm = torch.nn.utils.clip_grad_norm_(apex.amp.master_params(optimizer), cfg.max_norm)
                print("norm", float(grad_norm))
                for param_group in optimizer.param_groups:
                    param_group["lr"] = 0.01 * (1 - step / 100)
                optimizer.step()
                for param in model.parameters():
                    param.grad = None


if __name__ == "__main__":
    main()
