import ast
import doctest
import importlib.util
import inspect
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from lightning_fabric.strategies import STRATEGY_REGISTRY
from pytorch_lightning import Trainer
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse
from lightning_sparse import AdamCorrection, SparseDDPStrategy, callbacks, compressors, schedule
from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.loop.arguments import REFUSED
from lightning_sparse.strategy.names import systems
from lightning_sparse.testing import InvariantError, checks_for
from tests.helpers.commands import run_pytest
from tests.helpers.pages import DOCS, PAGES, ROOT, anchors, blocks, prose, rows, spans
from tests.helpers.sparse_ddp import batch, sgd_steps, sparse_ddp

SYSTEMS = DOCS / "strategies.md"
AUTHORS = DOCS / "write-a-compressor.md"
LIMITS, TOGETHER = DOCS / "compatibility.md", "## Combinations that raise an error"
MODULES = (lightning_sparse, callbacks, compressors, schedule)
NAMES = {name: getattr(module, name) for module in MODULES for name in module.__all__}
CLASSES = {name: each for name, each in NAMES.items() if inspect.isclass(each) or name == "sparsify_gradients"}
del CLASSES["Compression"]  # subclasses have the same arguments
STRATEGIES = [DDPStrategy.__init__, ModelParallelStrategy.__init__, DistributedDataParallel.__init__]
OTHERS = [LightningCLI.__init__, Trainer.__init__, Trainer.fit, *STRATEGIES]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def arguments_of(function):
    return set(inspect.signature(function).parameters)


def test_density_and_warm_up_of_every_system_are_those_that_are_told():
    told = {name.strip("`"): cells for name, _, *cells, _ in rows(SYSTEMS, "## All strategies")}
    chosen = {system.name: SparseDDPStrategy(**system.arguments).settings for system in systems()}
    assert told == {
        name: ["none", "none"]
        if settings.compressor.default_density is None
        else [f"{settings.density:g}", f"{settings.warmup_steps:g}"]
        for name, settings in chosen.items()
    }


@pytest.mark.parametrize("kind", COMPRESSORS.values())
def test_arguments_and_their_defaults_are_those_of_the_compressor(kind):
    table = rows(SYSTEMS, "## Arguments of compressors")
    listed = {argument: default for names, argument, default, _ in table if f"`{kind.__name__}`" in names}
    parameters = inspect.signature(kind).parameters
    assert listed == {f"`{argument}`": f"`{parameter.default!r}`" for argument, parameter in parameters.items()}


def test_the_table_of_the_api_lists_every_public_name():
    listed = re.findall(r"^\| `(?:\w+\.)?(\w+)` \|", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)


@each_page
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("url", ["", "https://host/owner/name"], ids=["unknown", "known"])
def test_what_a_package_index_shows_does_not_depend_on_where_it_stands(url):
    pytest.importorskip("setuptools")
    shown = runpy.run_path(str(ROOT / "setup.py"))["on_an_index"]((ROOT / "README.md").read_text(), url)
    links = re.findall(r"\]\(([^)]+)\)", re.sub(r"^```.*?^```", "", shown, flags=re.DOTALL | re.MULTILINE))
    assert all(link.startswith(("https://", "#")) for link in links)


@each_page
def test_files_tests_and_names_exist(page):
    text = ""
    for span in spans(page):
        if file := re.fullmatch(r"((?:tests|examples|configs|docs|lightning_sparse)/[\w/.]+)(::\w+)?", span):
            path = ROOT / file[1]
            assert path.exists(), span
            text = path.read_text() if path.is_file() else ""
        if test := re.fullmatch(r"[\w/.]*::(\w+)", span):  # a test name without a file belongs to the previous file
            assert f"def {test[1]}(" in text, span
        if re.fullmatch(r"lightning_sparse(\.\w+)+", span):
            module, _, name = span.rpartition(".")
            assert hasattr(importlib.import_module(module), name) or importlib.util.find_spec(span), span
        if re.fullmatch(r"sparse_\w+", span) and not hasattr(torch, span):
            assert span in StrategyRegistry, span


@each_page
def test_arguments_exist(page):
    known = set().union(*map(arguments_of, [*CLASSES.values(), *OTHERS]))
    for span in spans(page):
        if re.match(r"[a-z_]+=[^=]", span):
            assert span.partition("=")[0] in known, span
        if (call := re.match(r"(\w+)\(.*\)$", span)) and call[1] in CLASSES:
            tree = ast.parse(span, mode="eval").body
            given = {keyword.arg for keyword in tree.keywords}
            allowed = arguments_of(CLASSES[call[1]])
            allowed |= set().union(*map(arguments_of, OTHERS)) if call[1] == "SparseDDPStrategy" else set()
            assert given <= allowed, span


@each_page
def test_options_of_examples_exist(page):
    for script, options in re.findall(r"python (examples/[\w/]+\.py)([^\n`]*)", page.read_text()):
        assert (ROOT / script).is_file(), script
        folders = (ROOT / script).parent.glob("*.py"), (ROOT / "examples").glob("*.py")
        text = "".join(path.read_text() for folder in folders for path in folder)
        for option in re.findall(r"(--[\w-]+)", options):
            assert f'"{option}"' in text, f"{script} {option}"


SLOW = ROOT / "examples" / "benchmarks" / "README.md"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.exhaustive] if page == SLOW else [])
        for page in PAGES
        if blocks(page, "python") and page != AUTHORS
    ],
)
def test_code_runs(page):
    shown = {}
    for code in blocks(page, "python"):
        if code.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(code, shown, str(page), str(page), 0)
            assert doctest.DocTestRunner().run(test).failed == 0
        else:
            exec(code, shown)


@pytest.mark.exhaustive
def test_what_the_readme_shows_runs_with_what_its_install_brings(interpreter, tmp_path):
    (diff,), (use,) = (blocks(ROOT / "README.md", shown) for shown in ("diff", "python"))
    code = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))  # after the diff
    code = code.replace("num_nodes=4", "num_nodes=1, fast_dev_run=True, accelerator='cpu'")
    model = "from pytorch_lightning.demos.boring_classes import BoringModel\nmodel = BoringModel()\n"
    code = code.replace("\n\n", f"\n{model}\n", 1)
    (tmp_path / "train.py").write_text(f"import sys\nsys.modules['lightning'] = None  # not installed\n{code}\n{use}")
    ended = interpreter.run(tmp_path / "train.py")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", re.findall(r"^(\w+): \$\(READY\)", (ROOT / "Makefile").read_text(), re.MULTILINE))
def test_what_a_target_of_make_has_pytest_run_is_there(target):
    commands = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for line in commands.replace("\\\n", " ").splitlines():
        _, runs_pytest, arguments = line.partition("-m pytest ")
        words = shlex.split(arguments)
        if runs_pytest and any((ROOT / word).exists() for word in words):  # pytest without a path is the current run
            status, said = run_pytest(ROOT, *words, "--numprocesses=0", "--collect-only")
            assert status == 0, said


def test_arguments_of_ddp_that_are_told_to_be_refused_are_those_of_the_table():
    assert rows(LIMITS, "## Arguments of DDP that raise an error") == [
        [f"`{name}`", cure] for name, cure in REFUSED.items()
    ]
    for name in REFUSED:
        with pytest.raises(ValueError, match=f"^{name}="):
            SparseDDPStrategy(**{name: object()})


ASKED = {
    "density": 0.5,
    "warmup_steps": 2,
    "wire": "4bit",
    "exchange": "gather",
    "levels": 2,
    "optimizer_correction": AdamCorrection(),
    "schedule": "auto",
    "local_steps": 5,
}


@pytest.mark.parametrize("name", ASKED)
def test_an_argument_is_refused_with_the_compressors_of_its_row_alone(name):
    told = {feature.strip("`").partition("=")[0]: cell for feature, cell, _ in rows(LIMITS, TOGETHER)}
    for compressor in compressors.COMPRESSORS:
        is_explicit = f"`{compressor}`" in told[name]
        with pytest.raises(ValueError, match=f"^{name}=") if is_explicit else nullcontext():
            SparseDDPStrategy(compressor, **{name: ASKED[name]})


def changed(page, line="", instead=""):
    code = blocks(page, "python")[1]
    assert not line or code.count(line) == 1
    return code.replace(line, instead) if line else code


@pytest.fixture
def shared_random(forked, tmp_path, monkeypatch):
    def make(code):
        (tmp_path / "shared_random.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        forked[3].stop()
        return importlib.import_module("shared_random").SharedRandom

    with mock.patch.dict(StrategyRegistry), mock.patch.dict(STRATEGY_REGISTRY), mock.patch.dict(COMPRESSORS):
        yield make
    forked[3].stop()
    sys.modules.pop("shared_random", None)


def losses(rank, compressor):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Tanh(), torch.nn.Linear(48, 20))
    inputs = batch(rank, 0, 64)
    with sparse_ddp(model, compressor) as (ddp, engine):
        targets = inputs[:, :20].tanh()
        several = ((ddp(inputs) - targets).square().mean() for _ in range(100))
        steps = sgd_steps(ddp, engine, several, lr=0.5)
        return [(ddp.module(inputs) - targets).square().mean().item() for _ in steps]


def test_the_compressor_of_the_page_keeps_the_invariants_and_trains_at_its_own_density(forked, shared_random):
    subject = shared_random(changed(AUTHORS))
    for check in {check.holds: check for check in checks_for(subject)}.values():
        check(forked[3])
    for seen in forked[3].run(losses, subject):
        assert seen[-1] < seen[0] / 3


@pytest.mark.parametrize(
    ("line", "instead", "invariant"),
    [
        ("            chosen[0] = unsound\n", "            pass\n", "nonfinite_gradients_change_no_state"),
        (
            "        return [self._draw(",
            "        self._step += 1\n        return [self._draw(",
            "replicas_and_schedules_agree",
        ),
    ],
    ids=["hides a NaN", "changes its state in select"],
)
def test_what_the_page_warns_of_breaks_the_invariant_that_it_names(forked, shared_random, line, instead, invariant):
    subject = shared_random(changed(AUTHORS, line, instead))
    check = next(check for check in checks_for(subject) if check.holds.__name__ == invariant)
    assert invariant in AUTHORS.read_text()
    with pytest.raises(InvariantError, match=invariant):
        check(forked[3])


def test_each_compressor_of_the_page_works_as_it_stands_there(interpreter, tmp_path):
    smallest, complete, use = blocks(AUTHORS, "python")
    shown = {}
    exec(smallest, shown)
    (selection,) = shown["Largest"]().select(["weight"], [torch.tensor([0.1, -3.0, 2.0, -0.5])], [2])
    assert selection.values.tolist() == [-3.0, 2.0]
    (tmp_path / "shared_random.py").write_text(complete)
    (tmp_path / "script.py").write_text(use)
    done = interpreter.run(tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
