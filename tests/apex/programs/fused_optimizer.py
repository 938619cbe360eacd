import sys
from torch import manual_seed, nn, randint, randn
from torch.nn.utils import clip_grad_norm_


class Args:
    fp16 = "--fp16" in sys.argv
    fp16_opt_level = "O1"
    do_train = "--test" not in sys.argv


args = Args()
manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
if args.do_train:
    from apex.optimizers import FusedAdam

    optimizer = FusedAdam(model.parameters(), lr=0.05, betas=(0.9, 0.99), bias_correction=True)
    if args.fp16:
        from apex import amp

        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level, verbosity=0)
else:
    if args.fp16:
        from apex import amp

        model = amp.initialize(model, opt_level=args.fp16_opt_level, verbosity=0)
x, y = randn(64, 8), randint(0, 4, (64,))
if args.do_train:
    for step in range(6):
        loss = nn.functional.cross_entropy(model(x), y)
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            scale = amp._amp_state.loss_scalers[0].loss_scale()
        else:
            if step % 2:
                loss.backward()
            else:
                loss.backward()
            scale = 1.0
        norm = clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), norm.item(), scale)
else:
    for i in range(5):
        print(model(x).float().std().item() + i, float(i))
