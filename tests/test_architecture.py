import ast
import re
import subprocess
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "lightning_sparse"
FILES = sorted(PACKAGE.rglob("*.py"))

# A row may import the rows above and its own names, but not its neighbours in the row.
ROOMS = [
    {"removed"},
    {"functional"},
    {"compressors"},
    {"schedule"},
    {"engine"},
    {"loop"},
    {"strategy"},
    {"testing", "callbacks"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
ENGINE = [
    {"store"},
    {"memory", "wire", "observe"},
    {"collectives"},
    {"requirements"},
    {"step"},
    {"planner"},
    {"adam"},
    {"settings"},
    {"replicas"},
    {"shared_model"},
    {"local_steps"},
    {"engine"},
    {"__init__"},
]


@cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text())))


def noun(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def floor_of(name, floors):
    return next(height for height, names in enumerate(floors) if name in names)


def imports():
    for path in FILES:
        for name in imported(path):
            yield path, name


def test_imports_run_downward():
    for path, name in imports():
        if not name.startswith("lightning_sparse"):
            continue
        own = [part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts]
        theirs = [*name.split(".")[1:], "__init__", "__init__"]
        place, floors = (1, ENGINE) if own[0] == theirs[0] == "engine" else (0, ROOMS)
        one, other = own[place], theirs[place]
        assert one == other or floor_of(other, floors) < floor_of(one, floors), f"{path} imports {name}"


def test_no_files_import_each_other():
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    TopologicalSorter({name: imported(path) - {name} for name, path in modules.items()}).prepare()


def test_every_file_is_packed_and_known_to_git():
    files = {*PACKAGE.rglob("*.py")}
    assert {each.parent for each in files} == {each.parent for each in files if each.name == "__init__.py"}
    known = subprocess.run(["git", "ls-files", "*.py"], cwd=PACKAGE, capture_output=True, text=True)
    if known.stdout:  # empty outside of a checkout
        assert {PACKAGE / each for each in known.stdout.split()} == files


def test_the_rooms_are_few():
    entries = {noun(path) for path in FILES}
    assert entries == set().union(*ROOMS)
    assert len(entries) <= 12


def test_only_the_doors_know_lightning_and_one_file_which():
    for path, name in imports():
        if re.match(r"(pytorch_)?lightning(?!_sparse)", name) and path != PACKAGE / "strategy" / "lightning.py":
            assert noun(path) in ("callbacks", "strategy"), f"{path} imports {name}"
            assert name.partition(".")[0] == "lightning_utilities", f"{path} imports {name}"


def test_tests_lie_where_what_they_test_does():
    tests = Path(__file__).parent
    for path in tests.rglob("test_*.py"):
        folder = path.parent.relative_to(tests)
        assert (PACKAGE / folder).is_dir(), f"{path} is not where the package has a folder"


def test_what_tests_share_lies_beside_them():
    for path in Path(__file__).parent.rglob("*.py"):
        assert not any(re.match(r"tests\.(.*\.)?test_", name) for name in imported(path)), f"{path} imports a test"


def test_functional_knows_nothing_but_torch():
    standard = ("math", "typing", "collections", "itertools", "functools", "threading")
    allowed = ("torch", *standard, "lightning_sparse.functional")
    for path in (PACKAGE / "functional").glob("*.py"):
        assert all(name.startswith(allowed) for name in imported(path)), path


def test_only_collectives_the_engine_and_the_doors_call_torch_distributed():
    calling = {path.name for path in FILES if "torch.distributed" in imported(path) and noun(path) != "testing"}
    engine = {"collectives.py", "engine.py", "store.py"}
    assert calling == {*engine, "training.py", "handle.py", "state.py", "probes.py"}


def test_nothing_outgrows_a_reader():
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                where = f"{node.name} in {path}"
                body = node.body[1:] if ast.get_docstring(node) else node.body
                assert not body or node.end_lineno - body[0].lineno < 40, f"{where} is too long"
                arguments = [argument.arg for argument in node.args.args]
                assert all(len(name) > 2 for name in arguments), f"{where} has an argument of one or two letters"


PRIVATE = {  # private names of torch and Lightning -> why no public name is enough
    "torch": {
        "_current_graph_task_id": "nested backwards have no public number",
        "_storage_Use_Count": "whether a gradient's memory has another holder",
        "_cdata": "argument of `_storage_Use_Count`",
        "_version": "in-place changes of a tensor",
        "_execution_engine": "callback at the end of a backward, as DDP and FSDP2 register one",
        "_post_accumulate_grad_hooks": "order of a parameter's hooks",
        "_comm_hooks": "hooks of the user; to register one as a probe changes the user's DDP",
        "_is_profiler_enabled": "`record_function` costs 8 us in each stage, also without a profiler",
        "_get_active_ddp_module": "whether DDP calls a model",
        "_ddp_params_and_buffers_to_ignore": "names that DDP ignores, before DDP exists",
        "_get_backend": "timeout of a group",
        "_broadcast_coalesced": "broadcast of many tensors, as DDP calls it",
        "_timeout": "timeout of a group, and of Lightning's strategies",
        "_orig_mod": "module inside of `torch.compile`",
        "_foreach": "one kernel for many tensors",
        "_utils": "module of `_take_tensors`",
        "_take_tensors": "groups of tensors by dtype and size, as torch's data parallel code forms them",
        "_ExperimentalConfig": "spans of all threads in a profile",
        "_pytree": "tensors in nested batches",
    },
    "Lightning": {
        "_device_mesh": "mesh of one replica",
        "_setup_distributed": "start of the process group without a mesh of all ranks",
        "_batches_that_stepped": "step of Lightning's own log",
        "_backward_sync_control": "overridden: no_sync of Fabric",
    },
    "replaced at run time": {
        "_broadcast_sigterm_tensor": "Lightning's collective in each batch",
        "step": "steps that a GradScaler skips",
        "reducer": "DDP's reducer",
        "logger": "DDP's logger, which holds the reducer",
        "join_hook": "DDP's join",
    },
}
_REPLACED = re.compile(r"\.(\w+) = (?:\w+\.(\w+) = )?.*# type: ignore\[(?:method-assign|assignment)\]")
_OWN = re.compile(r"\b(?:self|cls|super\(\)|type\(self\))$")


def private_names():
    defined = [
        (node.name, any(ast.unparse(each) == "override" for each in node.decorator_list))
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
    ]
    own = {name for name, overrides in defined if not overrides}
    yield from (name for name, _ in defined if name not in own and re.match("_[^_]", name))
    for path in FILES:
        text = path.read_text()
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and not _OWN.search(ast.unparse(node.value)):
                is_foreign = not isinstance(node.value, ast.Name) or f"self.{node.attr}" not in text
                yield from [node.attr] if is_foreign or node.value.id == "strategy" else []
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                yield from (each.value for each in node.args[1:2] if isinstance(each, ast.Constant))
            elif isinstance(node, ast.ImportFrom):
                yield from (node.module + "." + ".".join(alias.name for alias in node.names)).split(".")


def test_private_names_of_torch_and_lightning_do_not_grow():
    ours = {"_replace", "_asdict", "_exit", "_current_frames", "_C", "_profiler"}  # Python's, and modules of a name
    found = {re.sub("^_foreach_.*", "_foreach", name) for name in private_names() if re.match("_[^_]", name)} - ours
    replaced = {name for path in FILES for names in _REPLACED.findall(path.read_text()) for name in names if name}
    assert found | replaced == set().union(*PRIVATE.values())
    assert sum(map(len, PRIVATE.values())) <= 28
