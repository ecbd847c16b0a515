"""Profiling the model that a command line names."""

import pytest

from lightning_sparse.cli.plan.profiler import profile_model
from tests.cli.plan.models import Plain
from tests.helpers.trainers import EXPECTED_WARNINGS

# Lightning's own parser calls what jsonargparse has renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in EXPECTED_WARNINGS),
]


def profile(name, *args):
    return profile_model([f"--model=tests.cli.plan.models.{name}", "--trainer.accelerator=cpu", *args])


def test_gradients_stand_in_the_order_of_backward():
    profiled = profile("WithData")
    assert set(profiled.names[:2]) == {"last.weight", "last.bias"}
    assert set(profiled.names[2:]) == {"first.weight", "first.bias"}
    sizes = {name: parameter.numel() for name, parameter in Plain().named_parameters()}
    assert dict(zip(profiled.names, profiled.sizes)) == sizes
    assert all(seconds >= 0 for seconds in profiled.backward_seconds)
    assert 0 < sum(profiled.backward_seconds) < 2
    assert 0 < profiled.other_seconds < 2
    assert (profiled.device, profiled.element_bytes) == ("cpu", 4)


def test_a_data_module_and_a_yaml_file_are_understood(tmp_path):
    (tmp_path / "fit.yaml").write_text(
        "seed_everything: 1\n"
        "trainer: {accelerator: cpu, strategy: sparse_topk, devices: 4, precision: bf16-true, max_epochs: 3}\n"
        "model: {class_path: tests.cli.plan.models.Plain, init_args: {width: 8}}\n"
        "data: {class_path: tests.cli.plan.models.Data, init_args: {batch_size: 2}}\n"
        "ckpt_path: nowhere.ckpt\n"
    )
    profiled = profile_model(["--config", str(tmp_path / "fit.yaml")])
    assert sum(profiled.sizes) == 2 * 32 * 8 + 8 + 32
    assert profiled.element_bytes == 2


def test_several_backward_passes_by_hand_are_added_up():
    profiled = profile("Manual")
    assert set(profiled.names[:2]) == {"first.weight", "first.bias"}
    assert profiled.names[4:] == ("unused",)
    assert profiled.backward_seconds[4] == 0.0
    assert sum(profiled.backward_seconds[:4]) > 0


@pytest.mark.parametrize(
    ("schedule", "length"),
    [
        ("one cycle", "--trainer.max_steps=2"),
        ("one cycle", "--trainer.max_epochs=-1"),
        ("cosine", "--trainer.max_epochs=1"),
        ("cosine", "--trainer.max_steps=-1"),
        ("plateau", "--trainer.max_epochs=1"),
    ],
)
def test_a_schedule_of_the_learning_rate_is_told_how_long_training_is(schedule, length):
    assert sum(profile("Scheduled", f"--model.schedule={schedule}", length).backward_seconds) > 0


@pytest.mark.filterwarnings("ignore:.*Total length of `.*` across ranks is zero")
@pytest.mark.parametrize(
    ("flaw", "named"), [("frozen", "requires a gradient"), ("detached", "training_step"), ("empty", "train dataloader")]
)
def test_what_cannot_be_profiled_is_refused(flaw, named):
    with pytest.raises(ValueError, match=named):
        profile("WithData", f"--model.flaw={flaw}")
