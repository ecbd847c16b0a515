"""One training, the same through each entry point: the Trainer, Fabric, a plain loop and Hugging Face's Trainer."""

import os
import warnings
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import AdamCorrection, LocalSteps, SparseDDPStrategy, SparseFabricStrategy, sparsify
from lightning_sparse.testing.tensors import assert_same, differences
from tests.helpers.devices import DEVICE
from tests.helpers.entry_points import ROWS, Net, as_hugging_face_wants, optimizer_of, rows_of, tensors_of
from tests.helpers.resuming import Numbered, fit_numbered
from tests.helpers.trainers import accelerator, expect

STEPS, SAVED, NORM = 13, 7, 0.1  # optimizer steps, those before the save, and of a gradient
SETTINGS = {
    "AdamW": {"compressor": "lags", "density": 0.1, "optimizer_correction": AdamCorrection(3, 2, 2)},
    "momentum": {"compressor": "dgc", "density": 0.1, "warmup_epochs": 0},
    "lags": {"compressor": "lags", "density": 0.1, "wire": "bfloat16", "local_steps": 5},
    "diloco": {"compressor": "dense", "local_steps": LocalSteps(5, 0.7, 0.9, nesterov=True)},
    "late": {"density": 0.1, "wire": "2bit", "local_steps": LocalSteps(5, residual_decay=0.9, overlap_steps=3)},
    "synchronous": {"density": 0.1, "local_steps": LocalSteps(5, overlap_steps=1, synchronous_steps=3)},
}


class Module(Numbered):
    def __init__(self, settings, save_after=None, path=""):
        super().__init__(save_after, path)
        self.settings, self.network = settings, Net()

    def training_step(self, batch, batch_index):
        return self.network(rows_of(self.global_rank, batch_index).to(self.device))["loss"]

    def validation_step(self, batch, batch_index):
        self.network(rows_of(0, batch_index).to(self.device))

    def configure_optimizers(self):
        optimizer, schedule = optimizer_of(self.network, self.settings)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def through_the_trainer(rank, settings, folder, resumes):
    path = str(folder / "trainer.ckpt")
    module = Module(settings) if resumes else Module(settings, SAVED, path)
    more = {"max_epochs": 1, "limit_train_batches": STEPS, "gradient_clip_val": NORM}
    more |= {"val_check_interval": 4, "limit_val_batches": 1}
    fit_numbered(rank, SparseDDPStrategy(**settings), module, path if resumes else None, **more)
    return tensors_of(module.network)


def through_fabric(rank, settings, folder, resumes):
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
    path = folder / "fabric.ckpt"
    with warnings.catch_warnings():
        expect()
        strategy = SparseFabricStrategy(**settings, total_steps=STEPS)
        fabric = Fabric(strategy=strategy, accelerator=accelerator(), devices=dist.get_world_size())
        fabric.launch()
        net = Net()
        optimizer, schedule = optimizer_of(net, settings)
        model, optimizer = fabric.setup(net, optimizer)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
        if resumes:
            fabric.load(path, state)
        for step in range(state["step"], STEPS):
            if step % 4 == 0 and step:
                model.eval()
                strategy.synchronize()  # as a validation of the Trainer does
                with strategy.shared_model(), torch.no_grad():
                    model(rows_of(0, 0).to(DEVICE))
                model.train()
            fabric.backward(model(rows_of(rank, step).to(DEVICE))["loss"])
            fabric.clip_gradients(model, optimizer, max_norm=NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step + 1 == SAVED:
                fabric.save(path, {**state, "step": SAVED})
        strategy.close()
    return tensors_of(net)


def through_a_plain_loop(rank, settings, folder, resumes, handle_first=True, wrap=DistributedDataParallel):
    net = Net().to(DEVICE)
    model = wrap(net)
    optimizer, schedule = optimizer_of(net, settings)
    with sparsify(model, optimizer, **settings, total_steps=STEPS) as handle:
        parts = {"model": net, "optimizer": optimizer, "schedule": schedule}
        if resumes:
            if handle_first:
                handle.load_state_dict(torch.load(folder / f"kept-{rank}.pt", weights_only=True))
            saved = torch.load(folder / "model.pt", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(saved[name])
            if not handle_first:
                handle.load_state_dict(torch.load(folder / f"kept-{rank}.pt", weights_only=True))
        for step in range(SAVED if resumes else 0, STEPS):
            if step % 4 == 0:
                model.eval()
                handle.synchronize()
                with handle.shared_model(), torch.no_grad():
                    model(rows_of(0, 0).to(DEVICE))
                model.train()
            model(rows_of(rank, step).to(DEVICE))["loss"].backward()
            handle.clip(norm=NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step + 1 == SAVED and not resumes:
                torch.save(handle.state_dict(), folder / f"kept-{rank}.pt")
                with handle.shared_model():
                    if rank == 0:
                        torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "model.pt")
                dist.barrier()
    return tensors_of(net)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows in the order in which Accelerate deals them out: a batch for each rank, then the next ones."""

    def __len__(self):
        return STEPS * dist.get_world_size() * ROWS

    def __getitem__(self, index):
        number, row = divmod(index, ROWS)
        step, rank = divmod(number, dist.get_world_size())
        return {"rows": rows_of(rank, step)[row]}


def through_hugging_face(rank, settings, folder, resumes, **arguments):
    with as_hugging_face_wants(rank):
        transformers = import_module("transformers")
        ours = import_module("lightning_sparse.loop.hugging_face")

        class InOrder(transformers.Trainer):
            def _get_train_sampler(self, *args):
                return torch.utils.data.SequentialSampler(Rows())

        net = Net()
        args = transformers.TrainingArguments(
            output_dir=str(folder / "hugging-face"),
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=ROWS,
            max_grad_norm=NORM,
            **{"eval_strategy": "steps", "save_steps": SAVED, "eval_steps": 4, **arguments},
            use_cpu=True,
            report_to=[],
            remove_unused_columns=False,
            ddp_find_unused_parameters=False,
            label_names=["rows"],
            prediction_loss_only=True,
            disable_tqdm=True,
        )
        data = {"train_dataset": Rows(), "eval_dataset": torch.utils.data.Subset(Rows(), range(8))}
        trainer = InOrder(model=net, args=args, optimizers=optimizer_of(net, settings), **data)
        trainer.add_callback(ours.SparsifyCallback(trainer, **settings))
        trainer.train(resume_from_checkpoint=str(folder / "hugging-face" / f"checkpoint-{SAVED}") if resumes else None)
    return tensors_of(net)


def best_of_hugging_face(rank, folder):
    """Let the Trainer load the model of its first evaluation at the end; return what there is, and what was saved."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    ends = through_hugging_face(rank, SETTINGS["lags"], folder, False, save_steps=4, **best)
    net = Net()
    saved = import_module("safetensors.torch")
    net.load_state_dict(saved.load_file(folder / "hugging-face" / "checkpoint-4" / "model.safetensors"))
    return ends, tensors_of(net)


def as_it_is(net):
    return net


ENTRY_POINTS = {
    "Fabric": through_fabric,
    "a plain loop": through_a_plain_loop,
    "a plain loop, without a wrapper": partial(through_a_plain_loop, wrap=as_it_is),
    "Hugging Face": through_hugging_face,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_training_is_the_same_to_the_bit_through_each_entry_point(pair, tmp_path, kind):
    settings = SETTINGS[kind]
    expected = pair.run(through_the_trainer, settings, tmp_path, False)
    first, second = ({**each} for each in expected)
    if "local_steps" not in settings:  # then a rank's statistics of BatchNorm are its own until DDP's next forward
        for name in [name for name in first if "running" in name]:
            del first[name], second[name]
    assert_same(second, first)
    assert differences(first, {name: each for name, each in tensors_of(Net()).items() if name in first})
    for entry_point in [through_the_trainer, *ENTRY_POINTS.values()]:
        if entry_point is through_hugging_face and (DEVICE.type != "cpu" or find_spec("transformers") is None):
            continue
        for resumes in (False, True):
            assert_same(pair.run(entry_point, settings, tmp_path, resumes), expected)
    assert_same(pair.run(partial(through_a_plain_loop, handle_first=False), settings, tmp_path, True), expected)


@pytest.mark.skipif(DEVICE.type != "cpu" or find_spec("transformers") is None, reason="as above")
def test_the_best_model_is_there_at_the_end_of_hugging_faces_trainer(pair, tmp_path):
    for ends, saved in pair.run(best_of_hugging_face, tmp_path):
        assert_same(ends, saved)
