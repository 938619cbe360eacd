import sys
import torch
from torch import nn, optim
from apex import amp

opt_level = "O0" if "--fp32" in sys.argv else "O1"
torch.manual_seed(0)
netD = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=0.02, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.02, betas=(0.5, 0.999))
[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt_level, num_losses=3
)
data = [torch.randn(16, 8) + 1.0 for _ in range(6)]
for i, batch in enumerate(data):
    weights = netD[0].weight.detach().clone(), netG[0].weight.detach().clone()
    netD.zero_grad()
    real = batch.to("cpu")
    label = torch.full((real.size(0), 1), 1.0)
    output = netD(real)
    errD_real = criterion(output, label) * (1e6 if i == 2 and "--overflow" in sys.argv else 1.0)
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()
    D_x = output.mean().item()

    noise = torch.randn(real.size(0), 4)
    fake = netG(noise)
    label.fill_(0.0)
    output = netD(fake.detach())
    errD_fake = criterion(output, label)
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    errD = errD_real + errD_fake
    nn.utils.clip_grad_norm_(netD.parameters(), 0.5)
    optimizerD.step()

    netG.zero_grad()
    label.fill_(1.0)
    output = netD(fake)
    errG = criterion(output, label)
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    nn.utils.clip_grad_norm_(netG.parameters(), 0.5)
    optimizerG.step()
    skipped = [float(torch.equal(w, net[0].weight)) for w, net in zip(weights, [netD, netG], strict=True)]
    print(errD.item(), errG.item(), D_x, *skipped)
