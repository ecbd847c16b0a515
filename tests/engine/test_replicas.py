import pytest
import torch
from torch import nn

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.compressors import A2SGD
from tests.helpers.trainers import Small, make_trainer


class Watched(Small):
    """A model with a local buffer and notes of its state at every observable point."""

    def __init__(self):
        super().__init__()
        self.network.insert(1, nn.BatchNorm1d(64))
        self.notes = {"batch": [], "validation": []}

    def state(self):
        tensors = [*self.parameters(), *(buffer for buffer in self.buffers() if buffer.is_floating_point())]
        return torch.cat([tensor.detach().flatten().clone() for tensor in tensors])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.notes["batch"].append(self.state())

    def on_validation_epoch_start(self):
        self.notes["validation"].append(self.state())


def fit_watched(rank, every, path):
    model = Watched()

    def save(*_):
        model.notes["saved"] = [model.state()]

    model.on_save_checkpoint = save
    strategy = SparseDDPStrategy(A2SGD(param_sync_every=every))
    trainer = make_trainer(rank, strategy, max_epochs=2, val_check_interval=7, num_sanity_val_steps=1)
    trainer.fit(model)
    trainer.save_checkpoint(path)
    model.notes["end"] = [model.state()]
    return model.notes, trainer.strategy.compression_stats(), torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.parametrize("every", [5, None])
def test_what_is_measured_and_saved_is_one_model(pair, tmp_path, every):
    (first, stats, saved), (second, _, _) = pair.run(fit_watched, every, str(tmp_path / "drift.ckpt"))
    for moment in ("validation", "end"):
        assert len(first[moment]) > 0
        assert all(torch.equal(one, other) for one, other in zip(first[moment], second[moment]))
    identical = [torch.equal(one, other) for one, other in zip(first["batch"], second["batch"])]
    assert [step for step, is_identical in enumerate(identical) if is_identical] == steps_with_average(every)
    assert 0 < stats["replica_divergence"] < 1
    total = sum(tensor.sum().double() for name, tensor in saved.items() if "num_batches" not in name)
    torch.testing.assert_close(total, first["end"][0].sum().double(), rtol=1e-4, atol=1e-4)


def steps_with_average(every):
    steps, since = [], 0
    for step in range(32):
        since += 1
        if every is not None and since >= every:
            steps.append(step)
            since = 0
        if step % 16 in (6, 13):  # validation follows
            since = 0
    return steps


class Changed(Watched):
    def on_train_epoch_end(self):
        assert self.notes["batch"]
        with torch.no_grad():
            self.network[0].bias.fill_(float(self.global_rank))


def fit_changed(rank, batches):
    strategy = SparseDDPStrategy(A2SGD(param_sync_every=batches))
    model = Changed()
    make_trainer(rank, strategy, limit_train_batches=batches, limit_val_batches=0).fit(model)
    assert (model.network[0].bias == 0.5).all()
    return model.state()


def test_weights_that_a_callback_has_written_are_made_one_too(pair):
    first, second = pair.run(fit_changed, 4)
    assert torch.equal(first, second)
