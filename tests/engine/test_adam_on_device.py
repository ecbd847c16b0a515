import torch

from lightning_sparse import AdamCorrection, sparsify_gradients
from tests.helpers.racing import CPU, CUDA, Skipping, played

RATE = 0.1


def trained_on(device):
    """Return parameters after a step with an unused layer and a gradient of the previous step.

    The ranks are those of :func:`~tests.helpers.racing.played`.
    """
    torch.manual_seed(0)
    net = Skipping()
    batches = torch.randn(5, 4, 64)
    net, batches = net.to(device), batches.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    correction = AdamCorrection(warmup_steps=2, density_decay_steps=0, second_moment_interval=100)
    with sparsify_gradients(
        net, optimizer, compressor="topk", density=0.01, schedule="single", levels=1, optimizer_correction=correction
    ):
        for step, batch in enumerate(batches):
            net(batch, skips=step == 4).backward()
            stale = net.between.weight.grad.cpu().clone()
            optimizer.step()
            if step < 3:
                optimizer.zero_grad()
    return stale, [parameter.detach().cpu() for parameter in net.parameters()]


def test_a_gradient_of_the_step_before_that_no_rank_has_replaced_is_applied_everywhere():
    with played():
        (stale, found), (expected_stale, expected) = trained_on(CUDA), trained_on(CPU)
    assert stale.any()
    for one, other in zip([stale, *found], [expected_stale, *expected], strict=True):
        torch.testing.assert_close(one, other)
