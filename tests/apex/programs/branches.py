import sys
import torch
from torch import nn

try:
    from apex import amp
except ImportError:
    amp = None


class Config:
    AMP_OPT_LEVEL = "O1" if "--amp" in sys.argv else "O0"
    ACCUMULATION_STEPS = 2 if "--accumulate" in sys.argv else 1
    CLIP_GRAD = 0.0 if "--free" in sys.argv else 0.3


def get_grad_norm(parameters):
    return sum(p.grad.norm().item() ** 2 for p in parameters if p.grad is not None) ** 0.5


def train_one_epoch(config, model, criterion, loader, optimizer):
    model.train()
    optimizer.zero_grad()
    for idx, (samples, targets) in enumerate(loader):
        outputs = model(samples)
        if config.ACCUMULATION_STEPS > 1:
            loss = criterion(outputs, targets)
            loss = loss / config.ACCUMULATION_STEPS
            if config.AMP_OPT_LEVEL != "O0":
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                if config.CLIP_GRAD:
                    grad_norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), config.CLIP_GRAD)
                else:
                    grad_norm = get_grad_norm(amp.master_params(optimizer))
            else:
                loss.backward()
                if config.CLIP_GRAD:
                    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.CLIP_GRAD)
                else:
                    grad_norm = get_grad_norm(model.parameters())
            if (idx + 1) % config.ACCUMULATION_STEPS == 0:
                optimizer.step()
                optimizer.zero_grad()
        else:
            loss = criterion(outputs, targets)
            optimizer.zero_grad()
            if config.AMP_OPT_LEVEL != "O0":
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                if config.CLIP_GRAD:
                    grad_norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), config.CLIP_GRAD)
                else:
                    grad_norm = get_grad_norm(amp.master_params(optimizer))
            else:
                loss.backward()
                if config.CLIP_GRAD:
                    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.CLIP_GRAD)
                else:
                    grad_norm = get_grad_norm(model.parameters())
            optimizer.step()
        print(loss.item(), float(grad_norm))


def main(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    if config.AMP_OPT_LEVEL != "O0":
        model, optimizer = amp.initialize(model, optimizer, opt_level=config.AMP_OPT_LEVEL, verbosity=0)
    loader = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(6)]
    train_one_epoch(config, model, nn.CrossEntropyLoss(), loader, optimizer)


if __name__ == "__main__":
    if Config.AMP_OPT_LEVEL != "O0":
        assert amp is not None, "apex is missing"
    main(Config())
