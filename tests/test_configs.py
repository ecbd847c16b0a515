import os
import sys
from pathlib import Path

import pytest
import torch
import yaml
from pytorch_lightning.cli import LightningCLI

from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.engine.requirements import takes_wire
from tests.helpers.trainers import accelerator, expect

ROOT = Path(__file__).parents[1]
SYSTEMS = sorted((ROOT / "configs").glob("*.yaml"))
OVERLAYS = sorted((ROOT / "configs").glob("*/*.yaml"))
FOLDERS = sorted({path.parent.name for path in OVERLAYS})
WITHOUT_DENSITY = ("a2sgd", "diloco")
STEPS = 3


def compressor_of(system):
    named = yaml.safe_load(system.read_text())["trainer"]["strategy"]["init_args"]["compressor"]
    kind = named if isinstance(named, str) else named["class_path"].rpartition(".")[2].lower()
    return COMPRESSORS[kind]()


def stacks(system):
    """Return the stacks for a system: no overlay, some single overlays, and some with an overlay per folder."""
    overlays = [path for path in OVERLAYS if system.stem not in WITHOUT_DENSITY or path.parent.name != "density"]
    overlays = [path for path in overlays if system.stem != "hsdp" or path.parent.name != "schedule"]
    overlays = [path for path in overlays if path.parent.name != "wire" or takes_wire(compressor_of(system), path.stem)]
    turn = SYSTEMS.index(system)
    alone = [path for path in overlays if path.parent.name == "wire" or OVERLAYS.index(path) % len(SYSTEMS) == turn]
    folders = [[path for path in overlays if path.parent.name == folder] for folder in FOLDERS]
    folders = [paths for paths in folders if paths]
    rows = range(turn % 2, max(map(len, folders)), 2)
    together = [tuple(paths[row % len(paths)] for paths in folders) for row in rows]
    return [(), *((path,) for path in alone), *together]


class FitCLI(LightningCLI):
    """LightningCLI with one command, because building all parsers takes longer than a fit."""

    @staticmethod
    def subcommands():
        return {"fit": LightningCLI.subcommands()["fit"]}


def fit_stacks(rank, stacks):
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", JSONARGPARSE_DEPRECATION_WARNINGS="off")
    sys.path.insert(0, str(ROOT / "examples"))
    expect(".*args parameter is intended.*", ".*AMP with fp16 is not supported on CPU.*", ".*logged any value.*")
    torch.manual_seed(0)
    return [_fit(files) for files in stacks]


def _fit(files):
    options = ["--trainer.devices=2", f"--trainer.fast_dev_run={STEPS}", "--trainer.enable_progress_bar=false"]
    words = ["fit", *(f"--config={file}" for file in files), *options, "--trainer.enable_model_summary=false"]
    trainer = {"accelerator": accelerator()}  # YAML cannot express the tested device
    cli = FitCLI(args=words, trainer_defaults=trainer, save_config_callback=None)
    return cli.config.fit.as_dict(), cli.trainer.strategy.compression_stats()


def assert_holds(config, told, path):
    for key, value in told.items():
        if isinstance(value, dict):
            assert_holds(config[key], value, path)
        elif key not in ("devices", "accelerator") and not key.startswith("enable_"):
            assert config[key] == value, f"{path} says {key}, which is lost"


def trained(pair, system, tried):
    files = [[str(system), *map(str, stack)] for stack in tried]
    results, _ = pair.run(fit_stacks, files, timeout=240)
    for stack, (config, stats) in zip(tried, results):
        for path in stack:
            assert_holds(config, yaml.safe_load(path.read_text()), path)
        # A2SGD has averaged the parameters once at the end.
        assert 0 < stats["total_wire_bytes"] < STEPS * stats["dense_bytes"] or stats["density"] < 0.5, stack
    return {stack: stats for stack, (_, stats) in zip(tried, results)}


each_system = pytest.mark.parametrize("system", SYSTEMS, ids=lambda path: path.stem)


@pytest.mark.sampled(4)
@each_system
def test_a_system_trains_alone_and_now_and_then_in_a_stack(system, pair):
    alone, *_, together = stacks(system)
    trained(pair, system, [alone] if SYSTEMS.index(system) % 3 else [alone, together])


@pytest.mark.exhaustive
@each_system
def test_a_system_trains_in_its_stacks(system, pair):
    by_stack = trained(pair, system, stacks(system))
    if system.stem != "a2sgd":
        narrow = [stack for stack in by_stack if len(stack) == 1 and stack[0].parent.name == "wire"]
        assert len(narrow) >= 2
        assert all(by_stack[stack]["wire_bytes"] < by_stack[()]["wire_bytes"] for stack in narrow)


def test_the_five_systems_are_there_and_complete():
    assert {"lags", "omgs", "a2sgd", "sdagc", "exdyna"} <= {path.stem for path in SYSTEMS}
    for path in SYSTEMS:
        assert set(yaml.safe_load(path.read_text())) == {"seed_everything", "trainer", "model", "data"}, path
