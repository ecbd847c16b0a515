"""The number of files that implement the path of a gradient."""

import sys
import threading
from pathlib import Path

import pytest
from pytorch_lightning import Callback
from torch.utils.data import DataLoader

import lightning_sparse
from tests.helpers.trainers import Rows, WithAdam, WithSGD, run_fit

PACKAGE = str(Path(lightning_sparse.__file__).parent)
STEP = 150  # after planning and after the second moment is accurate


class Long:
    def train_dataloader(self):
        return DataLoader(Rows(8 * STEP + 80), batch_size=4)


class LongSGD(Long, WithSGD):
    """SGD."""


class LongAdam(Long, WithAdam):
    """Adam."""


class Following(Callback):
    """Note the package files with functions that run in one step, on every thread that starts later."""

    def __init__(self):
        self.files = set()
        self.is_looking = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame, event, argument):
        if self.is_looking and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.files.add(frame.f_code.co_filename.removeprefix(PACKAGE + "/"))

    def on_train_batch_start(self, trainer, *args):
        self.is_looking = trainer.global_step == STEP

    def on_train_batch_end(self, trainer, *args):
        self.is_looking = False


def files_of_a_step(rank, model):
    following = Following()
    try:
        run_fit(rank, "sparse_topk", model(), callbacks=[following], max_steps=STEP + 2)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    return sorted(following.files)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "most"), [(LongSGD, 19), (LongAdam, 22)])
def test_a_gradient_goes_through_few_files(pair, model, most):
    files, _ = pair.run(files_of_a_step, model)
    assert len(files) <= most, "\n".join(files)
