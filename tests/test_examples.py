import json

import pytest
import torch

from tests.helpers.commands import begin
from tests.helpers.examples import EXAMPLES, load

gpt, muon = map(load, ["gpt", "muon"])


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 200 + "And so on")
    return path


def outcome_of(pool, name, *flags, folder):
    shared = ("--accelerator", "cpu", "--devices", str(pool.ranks), "--result", "result.json")
    pool.run(begin, str(EXAMPLES / name), (*shared, *flags), str(folder))
    return json.loads((folder / "result.json").read_text())


def test_image_example_sends_less_than_ddp(pair, tmp_path):
    dense = outcome_of(pair, "train_image.py", "--fast-dev-run", "--strategy", "ddp", folder=tmp_path)
    flags = ("--density", "0.01", "--wire", "bfloat16")
    sparse = outcome_of(pair, "train_image.py", "--fast-dev-run", *flags, folder=tmp_path)
    assert dense["bytes_per_step"] == dense["dense_bytes"] == sparse["dense_bytes"]
    assert sparse["bytes_per_step"] < dense["bytes_per_step"] / 50


@pytest.mark.exhaustive
def test_gpt_example_sends_less_than_ddp(pair, text_file):
    small = ("--length", "16", "--width", "32", "--blocks", "1", "--epochs", "2", "--epoch-steps", "20")
    dense, sparse = (
        outcome_of(pair, "train_gpt.py", "--text", text_file.name, *small, *flags, folder=text_file.parent)
        for flags in (("--strategy", "ddp"), ("--wire", "bfloat16"))
    )
    # Ten of forty steps and some mean gradients are dense.
    assert sparse["mean_bytes_per_step"] < dense["mean_bytes_per_step"] / 2
    assert sparse["score"] < 1.5 * dense["score"] < 4


def test_muon_and_adamw_in_one_are_both_and_resume_to_the_bit():
    def trained(steps, resumed=False, apart=False):
        torch.manual_seed(0)
        network = gpt.GPT(7, gpt.GPTSize(length=8, width=16, blocks=1, heads=2))
        elementwise = set(muon.embeddings_and_head(network))
        matrices = [each for each in network.parameters() if each.dim() == 2 and each not in elementwise]
        assert len(elementwise) == 3
        assert len(matrices) == 4
        if apart:
            rest = [each for each in network.parameters() if each.dim() != 2 or each in elementwise]
            optimizers = [
                torch.optim.Muon(matrices, 0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW(rest, 0.01, (0.9, 0.95), weight_decay=0.1),
            ]
        else:
            optimizers = [muon.MuonAdamW(network.parameters(), 0.01, elementwise=elementwise)]
        for step in range(steps):
            if resumed and step == steps // 2:
                saved = optimizers[0].state_dict()
                optimizers = [muon.MuonAdamW(network.parameters(), 0.5, elementwise=elementwise)]
                optimizers[0].load_state_dict(saved)
            network.zero_grad()
            windows = torch.randint(7, (4, 9), generator=torch.Generator().manual_seed(step))
            gpt.window_loss(network, windows).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [each.detach() for each in network.parameters()]

    assert all(map(torch.equal, trained(6), trained(6, apart=True)))
    assert all(map(torch.equal, trained(6), trained(6, resumed=True)))


@pytest.mark.exhaustive
def test_text_example_sends_less_than_ddp(pair, text_file):
    flags = ("--fast-dev-run", "--text", text_file.name, "--hidden", "32")
    dense = outcome_of(pair, "train_text.py", "--strategy", "ddp", "--no-tied", *flags, folder=text_file.parent)
    sparse = outcome_of(pair, "train_text.py", "--schedule", "layerwise", *flags, folder=text_file.parent)
    assert 1 < sparse["score"] < 100
    assert sparse["bytes_per_step"] < dense["bytes_per_step"] / 10


def test_every_epoch_of_the_gpt_has_windows_of_its_own():
    def first_batch(epoch):
        return next(iter(gpt.RandomWindows(torch.arange(10_000), 4, 8, seed=1, epoch_of=lambda: epoch)))

    assert not torch.equal(first_batch(0), first_batch(1))
    assert torch.equal(first_batch(1), first_batch(1))  # a resumed training reads the same batch
