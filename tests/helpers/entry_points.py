"""A network and its data, trained, saved and resumed through each entry point."""

import io
import os
import warnings
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from unittest import mock

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from lightning_sparse import SparseDDPStrategy, SparseFabricStrategy, sparsify_gradients
from tests.helpers.devices import DEVICE
from tests.helpers.resuming import Numbered, fit_numbered
from tests.helpers.trainers import accelerator, expect

ROWS = 4  # batch size
STEPS, SAVED, NORM = 13, 7, 0.1  # optimizer steps, steps before the save, clipping norm


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, rows):
        """Return the loss in the form that Hugging Face's Trainer expects."""
        return {"loss": (self.network(rows) - rows).square().mean()}


def rows_of(rank, step):
    return torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(100 * rank + step))


def optimizer_of(net, settings=None):
    """Return AdamW, or SGD if the compressor takes over its momentum, with a learning rate that falls every step."""
    if settings is not None and settings.get("compressor") == "dgc":
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def tensors_of(net):
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return {name: each.detach().cpu().clone() for name, each in tensors if each.is_floating_point()}


@contextmanager
def as_hugging_face_wants(rank):
    """Set the environment of a launched process, and reset Accelerate's state."""
    ranks = str(dist.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.filterwarnings("error", "gradients were changed")  # the Trainer warns when it computes the norm
        import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
        yield


class Module(Numbered):
    def __init__(self, settings, save_after=None, path=""):
        super().__init__(save_after, path)
        self.settings, self.network = settings, Net()

    def training_step(self, batch, batch_index):
        return self.network(rows_of(self.global_rank, batch_index).to(self.device))["loss"]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(STEPS * dist.get_world_size()))

    def validation_step(self, batch, batch_index):
        self.network(rows_of(0, batch_index).to(self.device))

    def configure_optimizers(self):
        optimizer, schedule = optimizer_of(self.network, self.settings)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def node_ranks_of(settings):
    return 2 if settings.get("levels") == 2 else dist.get_world_size()


def on_its_node(train):
    @wraps(train)
    def there(rank, settings, *arguments, **named):
        node, local = divmod(rank, node_ranks_of(settings))
        with mock.patch.dict(os.environ, GROUP_RANK=str(node), NODE_RANK=str(node), LOCAL_RANK=str(local)):
            return train(rank, settings, *arguments, **named)

    return there


def through_the_trainer(rank, settings, folder, resumes):
    path = str(folder / "trainer.ckpt")
    module = Module(settings) if resumes else Module(settings, SAVED, path)
    more = {"max_epochs": 1, "limit_train_batches": STEPS, "gradient_clip_val": NORM}
    more |= {"val_check_interval": 4, "limit_val_batches": 1, "local_world_size": node_ranks_of(settings)}
    fit_numbered(rank, SparseDDPStrategy(**settings), module, path if resumes else None, **more)
    return tensors_of(module.network)


def train_steps(rank, model, optimizer, schedule, handle, steps, backward, save):
    """Train, and evaluate the shared model every four steps, as validations of the Trainer do."""
    for step in steps:
        if step % 4 == 0:
            model.eval()
            handle.synchronize()
            with handle.shared_model(), torch.no_grad():
                model(rows_of(0, 0).to(DEVICE))
            model.train()
        backward(model(rows_of(rank, step).to(DEVICE))["loss"])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step + 1 == SAVED and steps[0] == 0:
            save()


@on_its_node
def through_fabric(rank, settings, folder, resumes):
    path = folder / "fabric.ckpt"
    with warnings.catch_warnings():
        expect()
        strategy = SparseFabricStrategy(**settings, total_steps=STEPS)
        devices, ranks = node_ranks_of(settings), dist.get_world_size()
        fabric = Fabric(strategy=strategy, accelerator=accelerator(), devices=devices, num_nodes=ranks // devices)
        fabric.launch()
        net = Net()
        optimizer, schedule = optimizer_of(net, settings)
        model, optimizer = fabric.setup(net, optimizer)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
        if resumes:
            fabric.load(path, state)

        def backward(loss):
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=NORM)

        def save():
            fabric.save(path, {**state, "step": SAVED})

        train_steps(rank, model, optimizer, schedule, strategy, range(state["step"], STEPS), backward, save)
        strategy.close()
    return tensors_of(net)


@on_its_node
def through_a_plain_loop(rank, settings, folder, resumes, handle_first=True, wrap=DistributedDataParallel):
    net = Net().to(DEVICE)
    model = wrap(net)
    optimizer, schedule = optimizer_of(net, settings)
    with sparsify_gradients(model, optimizer, **settings, total_steps=STEPS) as handle:
        parts = {"model": net, "optimizer": optimizer, "schedule": schedule}
        if resumes:
            handle_first &= "local_steps" not in settings
            if handle_first:
                handle.load_state(folder / "state")
            saved = torch.load(folder / "model.pt", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(saved[name])
            if not handle_first:
                handle.load_state(folder / "state")

        def backward(loss):
            loss.backward()
            clip_grad_norm_(net.parameters(), NORM)

        def save():
            handle.save_state(folder / "state")
            with handle.shared_model():
                if rank == 0:
                    torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "model.pt")
            dist.barrier()

        steps = range(SAVED if resumes else 0, STEPS)
        train_steps(rank, model, optimizer, schedule, handle, steps, backward, save)
    return tensors_of(net)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows in the order in which Accelerate distributes them: a batch for each rank, then the next step."""

    def __len__(self):
        return STEPS * dist.get_world_size() * ROWS

    def __getitem__(self, index):
        number, row = divmod(index, ROWS)
        step, rank = divmod(number, dist.get_world_size())
        return {"rows": rows_of(rank, step)[row]}


@on_its_node
def through_hugging_face(rank, settings, folder, resumes, steps=STEPS, **arguments):
    with as_hugging_face_wants(rank):
        transformers = import_module("transformers")
        ours = import_module("lightning_sparse.loop.hugging_face")

        class InOrder(transformers.Trainer):
            def _get_train_sampler(self, *args):
                return torch.utils.data.SequentialSampler(self.train_dataset)

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
        trained, evaluated = (
            torch.utils.data.Subset(Rows(), range(rows)) for rows in (steps * dist.get_world_size() * ROWS, 8)
        )
        data = {"train_dataset": trained, "eval_dataset": evaluated}
        trainer = InOrder(model=net, args=args, optimizers=optimizer_of(net, settings), **data)
        trainer.add_callback(ours.SparsifyCallback(trainer, **settings))
        checkpoint = str(folder / "hugging-face" / f"checkpoint-{SAVED}") if resumes else None
        trainer.train(resume_from_checkpoint=checkpoint)
    return tensors_of(net)


def as_it_is(net):
    return net


def pickled(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def static(net):
    return DistributedDataParallel(net, static_graph=True, gradient_as_bucket_view=True)


ENTRY_POINTS = {
    "the Trainer": through_the_trainer,
    "Fabric": through_fabric,
    "a plain loop": through_a_plain_loop,
    "a plain loop, without a wrapper": partial(through_a_plain_loop, wrap=as_it_is),
    "a plain loop, a static graph": partial(through_a_plain_loop, wrap=static),
    "Hugging Face": through_hugging_face,
}
