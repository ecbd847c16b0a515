import pytest
import torch

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import ReplicaSentinel
from lightning_sparse.loop.checks import ReplicaError
from tests.helpers.trainers import Small, make_trainer


class Tampered(Small):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 5:
            with torch.no_grad():
                bias = self.network[2].bias
                bias[3] = bias[3].nextafter(bias.new_tensor(9.0))
                self.network[2].weight[0, 0] += 1


def fit_tampered(rank):
    trainer = make_trainer(rank, SparseDDPStrategy(density=0.05), callbacks=[ReplicaSentinel(4)])
    with pytest.raises(ReplicaError) as caught:
        trainer.fit(Tampered())
    return trainer.global_step, str(caught.value)


def test_a_changed_parameter_is_named_and_ends_training_on_all_ranks(pair):
    (made, message), (others, _) = pair.run(fit_tampered)
    assert made == others == 8
    for told in ("after step 7", "'network.2.weight'", "rank 1", "2 of 4 parameters"):
        assert told in message
