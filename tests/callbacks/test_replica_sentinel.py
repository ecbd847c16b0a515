import pytest
import torch

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import ReplicaSentinel
from lightning_sparse.callbacks.replica_sentinel import ReplicaError
from tests.helpers.trainers import Small, make_trainer


class Tampered(Small):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 5:
            with torch.no_grad():
                bias = self.network[2].bias
                bias[3] = bias[3].nextafter(bias.new_tensor(9.0))
                self.network[2].weight[0, 0] += 1


def fit_tampered(rank, action):
    trainer = make_trainer(rank, SparseDDPStrategy(density=0.05), callbacks=[ReplicaSentinel(4, action)])
    if action == "raise":
        with pytest.raises(ReplicaError) as caught:
            trainer.fit(Tampered())
        return trainer.global_step, str(caught.value)
    if rank > 0:
        trainer.fit(Tampered())
        return trainer.global_step, ""
    with pytest.warns(UserWarning, match="ranks train different models") as warned:
        trainer.fit(Tampered())
    return trainer.global_step, str(next(each.message for each in warned if "different models" in str(each.message)))


@pytest.mark.parametrize(("action", "steps"), [("raise", 8), ("warn", 16)])
def test_a_changed_parameter_is_named_and_ends_training_on_all_ranks_unless_told(pair, action, steps):
    (made, message), (others, _) = pair.run(fit_tampered, action)
    assert made == others == steps
    for told in ("after step 7", "'network.2.weight'", "rank 1", "2 of 4 parameters"):
        assert told in message
