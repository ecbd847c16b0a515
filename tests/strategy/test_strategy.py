"""The Trainer's door: what users of Lightning do with the strategy, and what it refuses."""

import copy
import gc
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Optional
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor, nn

import lightning_sparse.engine.collectives
from lightning_sparse import SparseDDPStrategy
from lightning_sparse.compressors import LAGS, TopK
from lightning_sparse.engine.adam.correction import AdamCorrection, falling_density
from lightning_sparse.engine.collectives import Collectives, ExchangeError
from lightning_sparse.engine.settings import Settings
from lightning_sparse.loop.checks import warning_of_meeting
from lightning_sparse.strategy.names import systems
from lightning_sparse.testing.pool import Pool
from tests.compatibility.modules import ByHand
from tests.helpers.devices import DEVICE
from tests.helpers.sparse_ddp import COMPRESSOR_NAMES, DENSITY, backpropagate, sparse_ddp
from tests.helpers.statistics import STATS
from tests.helpers.trainers import Small, WithAdam, accelerator, make_trainer, run_fit, weights


def fit(rank: int, strategy: Any, module: Any = Small, **arguments: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Fit a module; return its parameters and the strategy's statistics."""
    trainer = run_fit(rank, strategy, module(), **arguments)
    stats = trainer.strategy.compression_stats() if isinstance(trainer.strategy, SparseDDPStrategy) else {}
    return weights(trainer.lightning_module), stats


def fit_with(
    rank: int, settings: dict[str, Any], module: Any = Small, arguments: Optional[dict[str, Any]] = None
) -> Any:
    """Fit with a strategy built from settings."""
    return fit(rank, SparseDDPStrategy(**settings), module, **(arguments or {}))


def fit_ddp(rank: int, module: Any = Small, arguments: Optional[dict[str, Any]] = None, **ddp_arguments: Any) -> Any:
    """Fit with plain DDP."""
    return fit(rank, DDPStrategy(**ddp_arguments), module, **(arguments or {}))


@pytest.mark.parametrize("name", ["sparse_topk", "sparse_dense", "sparse_topk_find_unused_parameters_true"])
def test_a_name_is_all_that_changes(pair: Pool, name: str) -> None:
    (first, stats), (second, _) = pair.run(fit, name)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert stats.keys() == STATS
    assert all(type(value) is float for value in stats.values())
    assert stats["dense_bytes"] == 4 * sum(tensor.numel() for tensor in first.values())
    assert stats["wire_bytes"] > 0


@pytest.mark.parametrize("schedule", ["layerwise", "merged", "single"])
@pytest.mark.parametrize("system", systems(), ids=lambda system: system.name)
def test_every_system_trains_under_every_schedule_and_ends_as_one_model(pair: Pool, system: Any, schedule: str) -> None:
    settings = {**system.arguments, "schedule": schedule}
    arguments = {"max_epochs": 2, "limit_train_batches": 6, "limit_val_batches": 1}
    (first, stats), (second, _) = pair.run(fit_with, settings, Small, arguments)
    assert all(torch.equal(first[key], second[key]) and first[key].isfinite().all() for key in first)
    assert not all(torch.equal(first[key], value) for key, value in weights(Small()).items())
    assert stats.keys() - {"replica_divergence", "local_steps"} == STATS


@pytest.mark.parametrize("system", systems(), ids=lambda system: system.name)
def test_every_name_is_registered_with_a_description(system: Any) -> None:
    for name in system.variants():
        assert StrategyRegistry[name]["description"] == system.description
        assert isinstance(StrategyRegistry.get(name), SparseDDPStrategy)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}, {"max_epochs": 2}],
    ids=str,
)
def test_density_one_trains_as_ddp_does(pair: Pool, arguments: dict[str, Any]) -> None:
    (ours, _), _ = pair.run(fit_with, {"density": 1.0}, Small, arguments)
    (ddp, _), _ = pair.run(fit_ddp, Small, arguments)
    for name in ddp:
        torch.testing.assert_close(ours[name], ddp[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"])
def test_precisions_train_and_stay_identical(pair: Pool, precision: str) -> None:
    (first, _), (second, _) = pair.run(fit_with, {"density": 0.05}, Small, {"precision": precision})
    assert all(torch.equal(first[key], second[key]) and first[key].isfinite().all() for key in first)


def fit_scaled(rank: int, settings: dict[str, Any], scale: Optional[float]) -> tuple[dict[str, Tensor], float]:
    """Fit in fp32 with a gradient scaler that doubles its scale every third step, or without one."""
    plugins = []
    if scale is not None:
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=scale, growth_interval=3)
        plugins = [MixedPrecision("16-mixed", DEVICE.type, scaler=scaler)]
        plugins[0].forward_context = nullcontext  # type: ignore[method-assign]  # the forward stays in fp32
    parameters, _ = fit(rank, SparseDDPStrategy(**settings), plugins=plugins)
    return parameters, scaler.get_scale() if scale is not None else 1.0


@pytest.mark.parametrize(
    ("compressor", "wire"), [*((name, "float16") for name in COMPRESSOR_NAMES), ("topk", "float32"), ("dgc", "float32")]
)
def test_a_changing_loss_scale_changes_nothing(pair: Pool, compressor: str, wire: str) -> None:
    settings = {"compressor": compressor, "density": DENSITY[compressor], "wire": wire}
    (unscaled, _), _ = pair.run(fit_scaled, settings, None)
    (scaled, last_scale), _ = pair.run(fit_scaled, settings, 2.0**10)
    assert last_scale == 2.0**15
    assert all(torch.equal(unscaled[name], scaled[name]) for name in unscaled)


class SparseEmbedding(Small):
    """A model with an embedding whose gradient is ``sparse_coo``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32, sparse=True)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        looked_up = self.embedding((batch[:, 0].abs() * 100).long() % 50)
        return (self.network(batch + looked_up) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MixedTypes(Small):
    """A model with parameters of three types."""

    def __init__(self) -> None:
        super().__init__()
        self.doubles = nn.Parameter(torch.ones(40, dtype=torch.float64))
        self.halves = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        extra = self.doubles.sum() * batch.mean() + self.halves.float().square().sum() * batch[0, 0]
        return (self.network(batch) - batch).square().mean() + 1e-3 * extra


@pytest.mark.parametrize("module", [SparseEmbedding, MixedTypes, ByHand])
def test_sent_whole_any_model_trains_as_with_ddp(pair: Pool, module: Any) -> None:
    (ours, _), (second, _) = pair.run(fit_with, {"density": 1.0}, module)
    (ddp, _), _ = pair.run(fit_ddp, module)
    assert all(torch.equal(ours[key], second[key]) for key in ours)
    for name in ddp:
        torch.testing.assert_close(ours[name], ddp[name], rtol=1e-2 if name == "halves" else 1e-5, atol=1e-6)


def count_bytes(rank: int, settings: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Return the bytes that left this rank in one step, and the statistics that tell of it."""
    sent: list[float] = []
    original = Collectives.run

    def watched(self: Collectives, name: str, tensor: Tensor, *out: Optional[Tensor]) -> Tensor:
        # All of it goes to all others; or to each of them its part of it; or, around a ring, both.
        others = self.ranks - 1
        times = {"all_gather": others, "all_to_all": others / self.ranks, "all_reduce": 2 * others / self.ranks}
        sent.append(times[name] * tensor.numel() * tensor.element_size())
        return original(self, name, tensor, *out)

    lightning_sparse.engine.collectives.Collectives.run = watched
    try:
        with sparse_ddp(nn.Linear(300, 70), **settings) as (ddp, engine):
            sent.clear()
            backpropagate(ddp, engine, ddp(torch.randn(4, 300, device=DEVICE)).sum())
            return sum(sent), engine.compression_stats()
    finally:
        lightning_sparse.engine.collectives.Collectives.run = original


@pytest.mark.parametrize("find_unused_parameters", [True, False])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("compressor", "density"), [("topk", 0.01), ("dense", None)])
def test_byte_counts_are_true(
    pools: dict[int, Pool], compressor: str, density: float, wire: str, find_unused_parameters: bool, ranks: int
) -> None:
    settings = {"compressor": compressor, "density": density, "wire": wire}
    for sent, stats in pools[ranks].run(count_bytes, {**settings, "find_unused_parameters": find_unused_parameters}):
        assert 0 < sent == pytest.approx(stats["wire_bytes"])
        assert stats["dense_bytes"] == pytest.approx(2 * (ranks - 1) / ranks * 4 * (300 * 70 + 70))
        assert stats["compression_ratio"] == stats["dense_bytes"] / stats["wire_bytes"]
        if compressor == "dense":  # as DDP: flags and padding are next to nothing
            assert stats["compression_ratio"] == pytest.approx(1 if wire == "float32" else 2, rel=2e-3)


def test_a_nonzero_costs_four_bytes_with_sixteen_bit_values(pair: Pool) -> None:
    for _, stats in pair.run(count_bytes, {"density": 0.01, "wire": "bfloat16"}):
        assert stats["wire_bytes"] / round(0.01 * 300 * 70) <= 4.1


VALUES: list[dict[str, Any]] = [
    *({"density": density} for density in (0, 100, "0.1", True)),
    {"compressor": "dense", "density": 0.1},
    {"compressor": "topp"},
    {"warmup_epochs": -1},
    {"compressor": "qsgd", "warmup_epochs": 4},
    *({name: name} for name in ("schedule", "wire", "exchange", "levels")),
    # Of DDP, what would be ignored, or taken out of our hands.
    *({"ddp_comm_hook": print}, {"ddp_comm_state": "state"}, {"ddp_comm_wrapper": print}),
    *({"model_averaging_period": 4}, {"bucket_cap_mb": 25}, {"device_ids": [0]}),
]
NAMES = {
    "densty": "density",
    "find_unused": "find_unused_parameters",
    "ratio": "density",
    "sparsity": "density",
    "warmup_steps": "warmup_epochs",
    "lr": "configure_optimizers",
    "densities": r"LAGS\(densities=",
    "outer_momentum": r"local_steps=LocalSteps\(5, outer_momentum=",
    "synchronous_steps": r"local_steps=LocalSteps\(5, synchronous_steps=",
    "xyz": "leave it out",
}


@pytest.mark.parametrize("arguments", VALUES, ids=lambda arguments: "-".join(arguments))
def test_a_value_that_cannot_be_is_refused_by_its_name(arguments: dict[str, Any]) -> None:
    *_, name = arguments
    with pytest.raises(ValueError, match=f"{name}="):
        SparseDDPStrategy(**arguments)


@pytest.mark.parametrize(
    "arguments", [{"compressor": TopK}, {"schedule": 3}, {"timeout": 60}], ids=["compressor", "schedule", "timeout"]
)
def test_an_object_of_another_kind_is_refused_by_its_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(arguments))):
        SparseDDPStrategy(**arguments)


@pytest.mark.parametrize(("name", "meant"), NAMES.items(), ids=NAMES)
def test_an_argument_that_there_is_not_is_refused_with_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{name}=1 .*{meant}"):
        SparseDDPStrategy(**{name: 1})


def test_a_warm_up_takes_the_published_densities() -> None:
    settings = Settings("dgc", 0.001, "merged", "float32")
    densities = [settings.density_at(epoch) for epoch in range(6)]
    assert densities == pytest.approx([0.25, 0.063, 0.016, 0.004, 0.001, 0.001], rel=0.02)


class AnotherMachines(float):
    """A number whose powers end in another digit, as of another machine's mathematical library."""

    def __pow__(self, exponent: Any, *modulo: Any) -> float:
        return math.nextafter(float(self) ** exponent, 2.0)


def test_a_warm_up_has_the_same_densities_on_every_machine() -> None:
    settings, others = Settings("dgc", 0.0013, "merged", "float32"), Settings("dgc", 0.0013, "merged", "float32")
    others.density = AnotherMachines(0.0013)
    assert [settings.density_at(epoch) for epoch in range(6)] == [others.density_at(epoch) for epoch in range(6)]
    for settled in (step / 100 for step in range(100)):
        assert falling_density(0.0013, settled) == falling_density(AnotherMachines(0.0013), settled)


def densities_by_epoch(rank: int) -> list[float]:
    """Fit four epochs with a warm-up over two; return the density at the end of each."""
    seen = []

    class Seeing(Small):
        def on_train_epoch_end(self) -> None:
            seen.append(self.trainer.strategy.compression_stats()["density"])

    strategy = SparseDDPStrategy("topk", density=0.01, warmup_epochs=2)
    make_trainer(rank, strategy, max_epochs=4).fit(Seeing())
    return seen


def test_the_density_falls_over_the_epochs_of_a_warm_up(pair: Pool) -> None:
    for seen in pair.run(densities_by_epoch):
        assert seen == pytest.approx([0.01 ** (1 / 3), 0.01 ** (2 / 3), 0.01, 0.01], rel=0.05)


class Complex(Small):
    """A model with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


def refused(rank: int, module: Any, optimize_ddp: Any = True) -> str:
    """Fit a model that must be refused; return the message."""
    import torch._dynamo

    torch._dynamo.config.optimize_ddp = optimize_ddp
    try:
        fit(rank, "sparse_topk", module)
    except (TypeError, RuntimeError) as error:
        return str(error)
    finally:
        torch._dynamo.config.optimize_ddp = True
    return "was not refused"


def test_a_complex_parameter_is_refused(pair: Pool) -> None:
    for message in pair.run(refused, Complex):
        assert message.startswith("parameters that are not real floating point cannot be compressed: phase (torch.co")


def test_the_gpu_of_a_mac_is_refused() -> None:
    strategy = SparseDDPStrategy()
    strategy.cluster_environment, strategy.parallel_devices = LightningEnvironment(), [torch.device("mps")]
    with pytest.raises(ValueError, match=r"accelerator='mps' cannot go together .* use accelerator='cpu'"):
        strategy.setup_environment()


def test_the_python_reducer_is_refused(pair: Pool) -> None:
    for message in pair.run(refused, Small, "python_reducer"):
        assert "set it to True (the default) or False" in message


class Mute(dist.ProcessGroup):
    """A backend that can do nothing."""


def check_mute_backend(rank: int) -> str:
    """Ask for collectives from a backend that has none; which device it refuses does not matter."""
    if not hasattr(dist.Backend, "MUTE"):
        dist.Backend.register_backend("mute", lambda store, rank, size, timeout: Mute(rank, size), devices=["cpu"])
    collectives = Collectives([0, 1], torch.device("cpu"))
    gloo, collectives.group = collectives.group, dist.new_group([0, 1], backend="mute")
    try:
        collectives.check(["all_to_all"])
    except RuntimeError as error:
        return str(error)
    finally:
        dist.destroy_process_group(gloo)
    return "was not refused"


def test_a_backend_without_the_collective_is_refused(forked: dict[int, Pool]) -> None:
    for message in forked[2].run(check_mute_backend):
        assert message.startswith(
            "process_group_backend='mute' cannot run all_to_all on cpu, which this compressor needs"
        )
    forked[2].stop()


def collectives_at_start(rank: int) -> int:
    """Set up an engine; return how often it connects all pairs of ranks."""
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as all_to_all:
        with sparse_ddp(nn.Linear(4, 4), "topk"):
            pass
        return all_to_all.call_count


def test_all_pairs_of_ranks_are_not_connected_before_that_is_needed(pair: Pool) -> None:
    assert pair.run(collectives_at_start) == [0, 0]


def test_one_process_trains_and_says_that_nothing_is_compressed(
    forked: dict[int, Pool], caplog: pytest.LogCaptureFixture
) -> None:
    ((ours, stats),) = forked[1].run(fit_with, {"density": 0.01})
    ((ddp, _),) = forked[1].run(fit_ddp)
    assert all(torch.equal(ours[name], ddp[name]) for name in ddp)
    assert stats == {}
    ((message,),) = forked[1].run(messages_of_a_fit)
    assert "one process, so there is nothing to exchange or compress" in message


def refusal_of(rank: int, settings: dict[str, Any], module: Any) -> str:
    """Fit what several processes refuse; return the message."""
    try:
        fit_with(rank, settings, module)
    except ValueError as error:
        return str(error)
    return "was not refused"


@pytest.mark.parametrize(
    ("settings", "module", "message"),
    [
        ({"compressor": LAGS(densities={"netwrok.0.weight": 1.0})}, Small, "did you mean 'network.0.weight'?"),
        ({"compressor": "dgc", "optimizer_correction": None}, WithAdam, "Adam works on the gradients themselves"),
        ({"optimizer_correction": AdamCorrection()}, Small, "but SGD cannot be corrected"),
    ],
    ids=["name of a parameter", "momentum of Adam", "correction of SGD"],
)
def test_one_process_refuses_what_several_refuse(
    forked: dict[int, Pool], settings: dict[str, Any], module: Any, message: str
) -> None:
    (alone,), (one, other) = (forked[ranks].run(refusal_of, settings, module) for ranks in (1, 2))
    assert message in alone
    assert alone == one == other


def messages_of_a_fit(
    rank: int, strategy: Any = "sparse_topk", module: Any = Small, about: str = "compress"
) -> list[str]:
    """Return what a fit logs about something."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pytorch_lightning").addHandler(handler)
    logging.getLogger("lightning_sparse").addHandler(handler)
    fit(rank, strategy, module)
    return [message for message in records if about in message]


@pytest.mark.parametrize(
    ("settings", "module", "said"),
    [
        ({"density": 0.001, "warmup_epochs": 4}, Small, "TopK sends 0.001 of .*over 4 epochs, from 0.25 to 0.001; "),
        ({"compressor": "dgc"}, Small, "momentum before selection"),
        ({}, WithAdam, "warm-up: that of the correction; .*updates before selection"),
        ({"compressor": "dense"}, Small, "Dense sends each gradient whole"),
    ],
    ids=["chosen", "dgc", "adam", "dense"],
)
def test_the_start_of_a_fit_says_what_is_sent(
    forked: dict[int, Pool], settings: dict[str, Any], module: Any, said: str
) -> None:
    for ranks in (1, 2):
        first, *_ = forked[ranks].run(messages_with, settings, module)
        (message,) = first
        assert re.search(said, message)


def messages_with(rank: int, settings: dict[str, Any], module: Any) -> list[str]:
    """Return what a fit with these settings says of what is sent."""
    return messages_of_a_fit(rank, SparseDDPStrategy(**settings), module, "; correction: ")


class Faulty(TopK):
    """A compressor that fails on one rank in one step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step = 0
        self.third_step_at = 0.0

    def select(self, names: Any, accumulated: Any, counts: Any) -> Any:
        self.step += 1
        if self.step == 3:
            self.third_step_at = time.monotonic()
        if self.step == 3 and dist.get_rank() == self.rank:
            raise ZeroDivisionError("the third step")
        return super().select(names, accumulated, counts)


def fit_faulty(rank: int) -> tuple[str, str, float, list[str]]:
    """Fit with a compressor that fails on rank 1; return what ``fit`` raised, how long after, and the threads left."""
    compressor = Faulty(1)
    try:
        fit(rank, SparseDDPStrategy(compressor=compressor, timeout=timedelta(seconds=20)))
    except (ZeroDivisionError, ExchangeError) as error:
        return type(error).__name__, str(error), time.monotonic() - compressor.third_step_at, thread_names()
    return "nothing", "", 0.0, thread_names()


def thread_names() -> list[str]:
    """Return the names of our threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_sparse")]


def test_an_exception_on_the_worker_reaches_the_user(forked: dict[int, Pool]) -> None:
    waiting, failed = forked[2].run(fit_faulty)
    assert failed[:2] == ("ZeroDivisionError", "the third step")
    assert waiting[0] == "ExchangeError"
    assert "all_gather" in waiting[1]
    assert "network.0.weight" in waiting[1]
    assert max(failed[2], waiting[2]) < 15
    assert failed[3] == waiting[3] == []
    forked[2].stop()


class Vanishing(Small):
    """A model whose rank 1 dies, or stops, in the fourth batch."""

    how = ""
    alone_since = 0.0

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        if batch_index == 3:
            self.alone_since = time.monotonic()
            if self.global_rank == 1 and self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.global_rank == 1:
                time.sleep(12)
        return super().training_step(batch, batch_index)


def fit_vanishing(rank: int, how: str) -> tuple[str, float]:
    """Fit while the other rank vanishes; return the message and how long the last batch took."""
    model = Vanishing()
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # its reduction would wait, too
    Vanishing.how = how
    trainer = make_trainer(rank, SparseDDPStrategy(timeout=timedelta(seconds=4)))
    try:
        trainer.fit(model)
    except ExchangeError as error:
        return str(error), time.monotonic() - model.alone_since
    return "nothing was raised", time.monotonic() - model.alone_since


@pytest.mark.parametrize("how", ["dies", "stops"])
def test_a_rank_that_vanishes_does_not_hang_the_others(forked: dict[int, Pool], how: str) -> None:
    forked[2].stop()
    (_, (message, seconds)), _ = forked[2].answers(fit_vanishing, how)
    forked[2].stop()
    assert "rank 0 of 2 waited in vain in all_gather of the group of 4 parameters" in message
    assert seconds < 11


def fit_again_and_again(rank: int, fits: int) -> tuple[list[str], int, int, float]:
    """Fit, validate and test many times; return threads left and the growth of threads, files and memory.

    On the CPU, whose memory is what is measured.
    """
    usage = []
    for count in range(fits):
        trainer = make_trainer(rank, "sparse_topk", accelerator="cpu", limit_train_batches=2)
        model = Small()
        trainer.fit(model)
        if count % 10 == 0:
            trainer.fit_loop.max_epochs += 1
            trainer.fit(model)
            trainer.validate(model, verbose=False)
            trainer.test(model, verbose=False)
        del trainer, model
        gc.collect()
        if count == 0:
            gc.freeze()  # modules: to look through them takes longer than to fit
        usage.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), resident_megabytes()))
    gc.unfreeze()
    settled, last = usage[fits // 4], usage[-1]
    return thread_names(), last[0] - settled[0], last[1] - settled[1], last[2] - settled[2]


def resident_megabytes() -> float:
    """Return the memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_many_fits_leak_nothing(pair: Pool) -> None:
    for threads, new_threads, new_files, new_megabytes in pair.run(fit_again_and_again, 60, timeout=200):
        assert threads == []
        assert new_threads <= 0
        assert new_files <= 0
        assert new_megabytes < 12


class Interrupted(Small):
    """A model whose user presses Ctrl-C in the third batch."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        if batch_index == 3:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_index)


def fit_interrupted(rank: int) -> tuple[list[str], bool]:
    """Interrupt a fit, and fit again."""
    trainer = make_trainer(rank, "sparse_topk")
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(Interrupted())
    except SystemExit:
        signal.signal(signal.SIGINT, handler)
        left = thread_names()
        return left, bool(fit(rank, "sparse_topk")[1])
    return ["was not interrupted"], False


def test_an_interrupted_fit_ends_the_worker(pair: Pool) -> None:
    assert pair.run(fit_interrupted) == [([], True)] * 2


class Failing(Small):
    """A model that raises in the third batch."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        if batch_index == 3:
            raise ZeroDivisionError
        return super().training_step(batch, batch_index)


def groups_given_back(rank: int, module: type[Small], backend: str) -> tuple[int, int]:
    """Fit over what calls itself another backend; return how many process groups are given back, and state is kept."""
    strategy = SparseDDPStrategy()
    distributed = Mock(wraps=dist, get_backend=lambda _: backend)
    with patch("lightning_sparse.engine.collectives.dist", distributed), suppress(ZeroDivisionError):
        make_trainer(rank, strategy).fit(module())
    return distributed.destroy_process_group.call_count, len(strategy.compression_stats())


@pytest.mark.parametrize(
    ("module", "backend", "groups"), [(Small, "nccl", 1), (Failing, "nccl", 0), (Failing, "gloo", 1)]
)
def test_a_rank_that_fails_does_not_wait_for_others_to_give_a_group_back(
    pair: Pool, module: type[Small], backend: str, groups: int
) -> None:
    for given_back, statistics in pair.run(groups_given_back, module, backend):
        assert given_back == groups
        assert statistics > 0


class Meeting(NamedTuple):
    """What a wrapper says of itself."""

    find_unused_parameters: bool = False
    static_graph: bool = False
    layers: tuple[nn.Module, ...] = ()

    def modules(self) -> tuple[nn.Module, ...]:
        return self.layers


@pytest.mark.parametrize(
    ("ddp", "backend", "environment", "message"),
    [
        (Meeting(), "nccl", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, None),
        (Meeting(find_unused_parameters=True), "nccl", {}, None),
        (Meeting(find_unused_parameters=True), "nccl", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, None),
        (Meeting(layers=(nn.SyncBatchNorm(2),)), "gloo", {}, None),
        (Meeting(layers=(nn.SyncBatchNorm(2),)), "nccl", {}, r"SyncBatchNorm exchanges .*overlaps_backward=False"),
        (
            Meeting(static_graph=True),
            "nccl",
            {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"},
            r"static_graph .*\(NCCL_LAUNCH_.*=1\)",
        ),
    ],
    ids=str,
)
def test_what_meets_the_exchange_on_nccl_is_warned_of(
    ddp: Any, backend: str, environment: dict[str, str], message: Optional[str]
) -> None:
    warning = warning_of_meeting(ddp, backend, environment)
    assert warning is None if message is None else re.search(message, warning or "")


def fit_overlapping(rank: int, overlaps_backward: bool) -> dict[str, Tensor]:
    """Fit with groups exchanged during backward, or after it."""
    return fit(rank, SparseDDPStrategy(density=0.1, overlaps_backward=overlaps_backward))[0]


def test_overlap_changes_no_number(pair: Pool) -> None:
    for overlapping, waiting in zip(pair.run(fit_overlapping, True), pair.run(fit_overlapping, False)):
        assert all(torch.equal(overlapping[name], waiting[name]) for name in overlapping)


def test_statistics_are_empty_before_the_first_step() -> None:
    trainer = Trainer(strategy=SparseDDPStrategy(), accelerator=accelerator(), devices=1, logger=False)
    assert trainer.strategy.compression_stats() == {}


NOTEBOOK = """
import lightning_sparse
from pytorch_lightning import Callback, Trainer
from tests.helpers.trainers import Small

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(strategy="sparse_lags_notebook", accelerator="cpu", devices=2, max_epochs=4, **quiet)
trainer.fit(Small())
assert trainer.strategy.engine is None
print(trainer.strategy.compression_stats()["density"], len(trainer.strategy.exchange_plan().groups))
"""


def test_what_forked_processes_have_to_tell_is_there_after_fit() -> None:
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    density, groups = done.stdout.split()
    assert 0 < float(density) < 0.02
    assert int(groups) > 0


class Copying(Callback):
    """Know the Trainer, and copy all callbacks whenever something happens."""

    copies = 0

    def copy_all(self, trainer: Trainer, *args: Any) -> None:
        self.trainer = trainer
        copy.deepcopy(trainer.callbacks)  # type: ignore[attr-defined]
        self.copies += 1

    on_fit_start = on_train_start = on_train_batch_end = on_train_end = copy_all


def fit_copying(rank: int, module: Any, arguments: dict[str, Any]) -> int:
    """Fit; return how often callbacks were copied."""
    callback = Copying()
    strategy = SparseDDPStrategy(**arguments)
    make_trainer(rank, strategy, callbacks=[callback], limit_train_batches=4).fit(module())
    return callback.copies


@pytest.mark.parametrize(
    ("module", "arguments"),
    [(WithAdam, {}), (Small, {"compressor": "lags", "schedule": "auto"}), (Small, {"local_steps": 2})],
    ids=["AdamW", "auto", "local steps"],
)
def test_callbacks_that_know_the_trainer_may_be_copied(pair: Pool, module: Any, arguments: dict[str, Any]) -> None:
    assert pair.run(fit_copying, module, {"density": 0.05, **arguments}) == [7, 7]
