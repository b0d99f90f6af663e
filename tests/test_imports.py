"""`import graphattn` is cheap, parts load on first use, and imports point in one direction."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import graphattn as ga

pytestmark = pytest.mark.every_case

ROOT = Path(ga.__file__).resolve().parent
KERNELS = ROOT.parent / "kernels"


def in_fresh_interpreter(code: str) -> str:
    """Run `code` in a new Python, started away from the repository, and return what it prints."""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.anchor, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


# What a part of the library adds to `import torch`, without what numpy adds of itself.
START = """
import sys, time
import numpy, torch
before = set(sys.modules)
start = time.process_time()  # what others do at the same time is not counted
"""
TELL = """
print(time.process_time() - start, *sorted(set(sys.modules) - before))
"""
FIRST = {
    "import graphattn": "import graphattn",
    "a first layer": """
import graphattn as ga
layer = ga.nn.SelfConsensus(32, heads=4)
layer(torch.randn(2, 10, 32), ga.window_path_graph(10, 2)).sum().backward()
""",
    "all layers and models": """
import graphattn as ga
for name in ga.nn.__all__:
    getattr(ga.nn, name)
ga.models.CausalLM(5, 8, 2, 2, window=3)(torch.tensor([[1, 2, 3]]))
""",
}
# torch_geometric imports transformers and pandas, and torch._dynamo takes a second.
HEAVY = (
    "torch_geometric", "torch._dynamo", "torch._inductor", "sympy", "scipy", "triton", "matplotlib",
    "transformers", "pandas", "networkx", "sklearn", "safetensors", "huggingface_hub", "jinja2",
    "typer", "rich", "yaml",
)  # fmt: skip


@pytest.fixture(scope="module")
def added() -> Callable[[str], tuple[float, set[str]]]:
    """Seconds of a processor and modules that code adds to `import torch`."""

    @functools.cache
    def measured(what: str) -> tuple[float, set[str]]:
        seconds, *modules = in_fresh_interpreter(START + FIRST[what] + TELL).split()
        return float(seconds), set(modules)

    return measured


@pytest.mark.parametrize("what", FIRST)
def test_nothing_heavy_is_imported_that_is_not_used(added, what):
    modules = added(what)[1]
    assert not {heavy for heavy in HEAVY if heavy in modules}


@pytest.mark.parametrize(
    ("what", "most"),
    [("import graphattn", 200), ("a first layer", 260), ("all layers and models", 310)],
)
def test_a_first_use_adds_few_modules_to_torch(added, what, most):
    """Before, a first layer added 3,500: torch_geometric, transformers, the compiler."""
    modules = added(what)[1]
    assert 80 < len(modules) <= most


def test_a_first_layer_adds_under_half_a_second_to_importing_torch(added):
    """The best of three, of which one is enough where it is under half a second."""
    found = [added("a first layer")[0]]
    while min(found) >= 0.5 and len(found) < 3:
        found.append(float(in_fresh_interpreter(START + FIRST["a first layer"] + TELL).split()[0]))
    assert min(found) < 0.5


def test_importing_graphattn_adds_its_own_modules_and_the_standard_library_only(added):
    names = {name.split(".")[0] for name in added("import graphattn")[1]}
    allowed = set(sys.stdlib_module_names) | {"graphattn", "numpy", "torch"}
    finders = {name for name in names if name.startswith("__editable__")}
    assert names - finders <= allowed


# Orders of imports: what each prints is True.
ORDERS = """
import graphattn, sys; print("torch" not in sys.modules and graphattn.__version__ > "")
import graphattn, sys; dir(graphattn); print("union" in dir(graphattn))
import graphattn, torch; print(bool(torch.ops.graphattn.attention))
import graphattn as g, importlib.util; {find}("torch"); import torch; print("ops" in vars(g))
import torch, graphattn; print("union" in vars(graphattn))
from graphattn import *; print(causal_graph(3).num_edges == 6 and nn.__name__ == "graphattn.nn")
import graphattn.graphs.token_graph; import graphattn as ga; print(ga.union.__name__ == "union")
import graphattn.kernels.bands.schedule; import graphattn as ga; print(ga.union.__name__ == "union")
import graphattn.nn; import graphattn as ga; print(ga.union.__name__ == "union")
import graphattn.data, torch; import graphattn as ga; print(ga.union.__name__ == "union")
import graphattn; print(not hasattr(graphattn, "no_such_thing"))
import graphattn.train as t, sys; print("torch" not in sys.modules and "fit" in t.__all__)
""".format(find="importlib.util.find_spec")


def test_operators_are_registered_and_names_are_there_in_any_order_of_imports():
    lines = ORDERS.strip().splitlines()
    code = "import subprocess, sys\nruns = [subprocess.Popen([sys.executable, '-c', line]"
    code += ", stdout=subprocess.PIPE, text=True) for line in " + repr(lines) + "]\n"
    code += "print([run.communicate()[0].strip() for run in runs])"
    assert in_fresh_interpreter(code) == repr(["True"] * len(lines))


COMMAND = """
import contextlib, io, sys
from graphattn.cli import main
sys.argv = ["graphattn", *{arguments!r}]
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
    with contextlib.redirect_stdout(io.StringIO()):
        main()
print(len(sys.modules), *sys.modules)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["train", "--stepz", "5"],
        ["demo", "--toknes", "5"],
        ["trian"],
    ],
    ids=" ".join,
)
def test_help_and_a_mistyped_option_do_not_wait_for_torch(arguments):
    count, *modules = in_fresh_interpreter(COMMAND.format(arguments=arguments)).split()
    assert not {"torch", "numpy", *HEAVY} - {"typer", "rich"} & set(modules)
    assert "typer" in modules
    assert int(count) < 450


PARTS = """
import graphattn as ga, sys
for part in (
    "distributed", "nn", "data", "models", "spectral", "dynamics", "diagnostics", "train", "plot"
):
    name = "graphattn." + part
    assert name not in sys.modules, name
    assert getattr(ga, part) is sys.modules[name]
    assert getattr(ga, part) is getattr(ga, part)
print("parts load", "biotite" in sys.modules)  # it loads when a structure is read
"""


def test_parts_load_on_first_use():
    assert in_fresh_interpreter(PARTS) == "parts load False"


def test_star_import_gives_everything_public():
    names: dict[str, object] = {}
    exec("from graphattn import *", names)
    assert set(ga.__all__) <= set(names)


def test_an_unknown_attribute_raises_attribute_error_and_names_it():
    with pytest.raises(AttributeError, match="no_such_thing"):
        ga.no_such_thing  # noqa: B018
    assert not hasattr(ga, "torch_geometric")


def test_dir_lists_every_public_name():
    assert set(ga.__all__) <= set(dir(ga))
    assert set(ga.nn.__all__) <= set(dir(ga.nn))


def test_public_names_are_listed_once_and_exist():
    parts = (ga.nn, ga.models, ga.train, ga.plot, ga.spectral, ga.data, ga.dynamics, ga.diagnostics)
    for module in (ga, *parts, ga.distributed):
        assert len(module.__all__) == len(set(module.__all__))
        assert all(hasattr(module, name) for name in module.__all__)


# Who may import whom: the folder, and the folders of graphattn it may read.

ARROWS = {
    "graphs": {"kernels"},
    "ops": {"graphs", "kernels"},
    "nn": {"distributed", "ops", "graphs", "version"},
    "spectral": {"graphs"},
    "data": {"graphs"},
    "distributed": {"ops", "graphs"},
    "dynamics": {"ops", "graphs"},
    "diagnostics": {"nn", "ops", "graphs", "dynamics"},
    "models": {"nn", "distributed", "ops", "graphs", "data"},
    "integrations": {"nn", "ops", "graphs"},
    "train": {"models", "integrations", "nn", "distributed", "ops", "graphs", "data", "diagnostics",
              "spectral", "version"},
    "plot": {"models", "integrations", "nn", "ops", "graphs", "spectral", "dynamics",
             "diagnostics", "data", "train", "distributed"},
    "explorer": {"models", "graphs", "spectral", "dynamics", "diagnostics", "data", "version"},
    "bench": {"models", "integrations", "train", "nn", "ops", "graphs", "data", "diagnostics",
              "plot", "kernels", "plain_tables", "graphattn itself"},
    "plain_tables": set(),
    "kernels": set(),
    "version": set(),
    "late_imports": set(),
    "near_names": set(),
    "warn": set(),
}  # fmt: skip
EVERYWHERE = {"late_imports", "near_names", "warn"}
# `spectral.certify` takes layers and models too; these load when it gets one.
LOADED_LATER = {
    "graphattn.spectral.certificates.modules": {"nn", "ops"},
    "graphattn.spectral.certificates.layers": {"nn", "ops"},
    "graphattn.spectral.certificates.frozen_steps": {"nn", "ops"},
    "graphattn.spectral.certificates.two_tracks": {"nn", "ops"},
}
IMPLEMENTATIONS = {"reference", "structured", "native", "triton", "fused", "streaming"}


def modules() -> dict[str, Path]:
    """Every module of the library: its dotted name and its file."""
    found = {}
    for top, folder in (("graphattn", ROOT), ("graphattn.kernels", KERNELS)):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((top, *parts))] = path
    return found


MODULES = modules()


def for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported_modules(name: str) -> frozenset[str]:
    """Dotted names of the graphattn modules that a module imports, anywhere in its text.

    graphattn itself names for type checkers what loads on first use: that imports nothing.
    """
    path, found = MODULES[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    body = tree_of(path).body
    if name == "graphattn":
        body = [node for node in body if not for_type_checkers(node)]
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *(node.module.split(".") if node.module else [])])
            below = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else base for name in below}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named = node.args[0]  # an import all the same, where the name stands there
            found |= {named.value} if isinstance(named, ast.Constant) else set()
    return frozenset(name for name in found if name.split(".")[0] == "graphattn")


def folder_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "graphattn itself"


def test_the_reading_of_imports_sees_what_it_should():
    """The checks below are worth nothing if this one is wrong."""
    seen = imported_modules("graphattn.ops.attention.api")
    assert "graphattn.ops.attention.reference" in seen
    assert "graphattn.graphs.token_graph" in seen
    assert "graphattn.nn.rotary" in imported_modules("graphattn.nn")
    assert len(MODULES) > 30


def test_every_folder_has_a_rule():
    folders = {folder_of(name) for name in MODULES} - {"graphattn itself", "cli"}
    assert folders <= set(ARROWS)


def test_imports_point_downward_only():
    upward = {}
    for name in MODULES:
        folder = folder_of(name)
        if folder == "cli":
            continue
        own = {"graphs", "ops", "version"} if folder == "graphattn itself" else {folder}
        allowed = own | EVERYWHERE | ARROWS.get(folder, set()) | LOADED_LATER.get(name, set())
        upward[name] = set(map(folder_of, imported_modules(name))) - allowed
    assert len(upward) > 400
    assert not {name: up for name, up in upward.items() if up}


def test_nothing_imports_the_command_line():
    for name in MODULES:
        if folder_of(name) != "cli":
            assert "cli" not in set(map(folder_of, imported_modules(name))), name


def files_in_circles(arrows: dict[str, set[str]]) -> set[str]:
    """Files from which arrows lead back to themselves."""
    found = set()
    for start in arrows:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            reached = arrows.get(waiting.pop(), set()) - seen
            seen |= reached
            waiting += reached
        if start in seen:
            found.add(start)
    return found


def test_no_file_imports_itself_by_way_of_others():
    """Imports at the top, in functions and for type checkers count: a file is read alone."""
    arrows = {name: (imported_modules(name) & set(MODULES)) - {name} for name in MODULES}
    assert "graphattn.graphs.edges.storage" in arrows["graphattn.graphs.orders"]
    assert not files_in_circles(arrows)


def test_circles_are_found_over_any_number_of_files():
    """A search that missed circles would let every set of imports pass."""
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set(), "f": {"f"}}
    assert files_in_circles(arrows) == {"a", "b", "c", "f"}
    del arrows["c"]
    assert files_in_circles(arrows) == {"f"}


MOST_FILES = 10  # beside __init__.py, which says what a folder is for


def test_a_folder_has_at_most_ten_files():
    """A folder is a room that a newcomer reads in one look: then it is one subject."""
    files = Counter(p.parent for p in MODULES.values() if p.stem not in ("__init__", "__main__"))
    assert len(files) > 60
    assert not {str(f.relative_to(ROOT.parent)): n for f, n in files.items() if n > MOST_FILES}


def test_every_folder_says_what_it_is_for():
    for path in {path.parent for path in MODULES.values()}:
        first = ast.get_docstring(tree_of(path / "__init__.py"))
        assert first, path


def engine_of(name: str) -> str | None:
    """graphattn.ops.attention for graphattn.ops.attention.reference, None outside the engines."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[1:2] == ["ops"] and len(parts) >= 4 else None


def test_only_the_table_of_backends_chooses_among_the_implementations_of_an_engine():
    """reference, structured, triton, ... (files or folders) do not import each other."""
    # The table, front doors, what torch.compile takes of them, and rows of steps.
    front = (".api", ".backends", ".decode", ".candidates", ".operators", ".step.pairs")
    inside = [name for name in MODULES if engine_of(name) and not name.endswith(front)]
    assert len(inside) > 30
    for name in inside:
        own = name.split(".")[3]
        others = {n.split(".")[3] for n in imported_modules(name) if engine_of(n)} - {own}
        allowed = {"structured"} if own == "native" else set()  # whose plans it has other rows for
        assert not others & IMPLEMENTATIONS - allowed, name
        assert f"{engine_of(name)}.api" not in imported_modules(name), name  # no step back up


def test_engines_do_not_import_each_other():
    for name in filter(engine_of, MODULES):
        engines = {engine_of(other) for other in imported_modules(name)} - {None}
        # `ops/library/` is no engine: it makes operators of torch.library for all of them.
        assert engines - {"graphattn.ops.library"} <= {engine_of(name)}, name


OPTIONAL = ("transformers", "matplotlib", "triton", "biotite", "sklearn", "torch_scatter")


def test_heavy_packages_are_not_imported_at_the_top():
    """Inside a function, or under TYPE_CHECKING, they may."""
    heavy = {*OPTIONAL, "torch_geometric", "scipy", "networkx"}
    checked = [name for name in MODULES if folder_of(name) in ("graphs", "ops", "nn")]
    assert len(checked) > 100
    for name in checked:
        top = set()
        for node in tree_of(MODULES[name]).body:
            if isinstance(node, ast.Import):
                top |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                top.add(node.module.split(".")[0])
        assert not top & heavy, name


# The rooms of kernels/: what each may import. Sums of a consensus step go over rows of edges, and
# neighbours are searched within bands; otherwise families do not know one another.

FAMILIES = {
    "bands": set(),
    "edges": set(),
    "consensus": {"edges"},
    "neighbors": {"bands"},
    "generation": set(),
}
ROOMS = {
    "shared": set(),
    "cpu": {"shared"},
    **{family: {"shared", *others} for family, others in FAMILIES.items()},
    "check": {"shared", *FAMILIES},
}
# In these a kernel goes over pairs of tokens, forward and backward.
OVER_PAIRS = ("bands", "edges", "consensus")
OF_A_FAMILY = {"schedule", "inputs", "math", "forward", "backward", "configurations"}


def kernel_modules() -> dict[str, Path]:
    return {name: path for name, path in MODULES.items() if folder_of(name) == "kernels"}


def room_of(name: str) -> str:
    """bands for graphattn.kernels.bands.forward; nothing for graphattn.kernels itself."""
    return name.split(".")[2] if name.count(".") > 1 else ""


def imported_while_running(name: str) -> set[str]:
    """Files of kernels/ that a file imports, in functions too; not what only type checkers read."""
    tree = tree_of(MODULES[name])
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if for_type_checkers(node)
        for part in node.body
        for inner in ast.walk(part)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports by dots"  # not read here
            found |= {
                below if (below := f"{node.module}.{alias.name}") in MODULES else f"{node.module}"
                for alias in node.names
            }
    return found & set(kernel_modules())


def test_every_room_of_the_kernels_has_a_rule():
    assert {room_of(name) for name in kernel_modules()} - {""} == set(ROOMS)


def test_rooms_of_the_kernels_import_downward_only():
    for name in kernel_modules():
        room = room_of(name)
        reached = {room_of(other) for other in imported_while_running(name)}
        assert reached <= ({room, *ROOMS[room]} if room else set()), name


def test_nothing_but_the_check_reads_what_is_there_for_the_check():
    for name in MODULES:
        read = imported_modules(name) - {name}
        if name.startswith("graphattn.kernels.check"):
            continue
        assert not {other for other in read if other.startswith("graphattn.kernels.check")}, name
        if not name.endswith(".configurations"):
            assert not {other for other in read if re.search(r"\.configurations?$", other)}, name


@pytest.mark.parametrize("family", OVER_PAIRS)
def test_families_of_kernels_name_their_files_alike(family):
    found = {path.stem for path in (KERNELS / family).glob("*.py")}
    assert found >= OF_A_FAMILY


@pytest.mark.parametrize("family", FAMILIES)
def test_a_name_of_a_file_does_not_repeat_the_family(family):
    """forward, not band_forward; and every family says what is compiled ahead of time."""
    found = {path.stem for path in (KERNELS / family).glob("*.py")}
    assert "configurations" in found
    assert not {stem for stem in found if family.rstrip("s") in stem}


def test_no_two_classes_or_kernels_have_one_name():
    """A report or a traceback gives a name alone, and that must be enough to find the code."""
    names: Counter[str] = Counter()
    for path in kernel_modules().values():
        for node in tree_of(path).body:
            is_kernel = isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
            if is_kernel or isinstance(node, ast.ClassDef):
                names[node.name] += 1
    assert names["BandInputs"] == names["band_forward_kernel"] == 1
    assert not [name for name, count in names.items() if count > 1]


def test_no_class_name_stands_for_two_things():
    """Private ones count, too: what a traceback or a search shows is the name alone."""
    homes: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert len(homes) > 300
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_the_source_of_an_installed_library_says_that_it_is_not_what_is_installed(tmp_path):
    """Python finds `graphattn` in the folder of the source, and its kernels nowhere."""
    (tmp_path / "graphattn").symlink_to(Path(__file__).parents[1] / "graphattn")
    run = subprocess.run(
        [sys.executable, "-S", "-c", "import graphattn"],  # without what is installed
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ImportError: graphattn is imported from its own source" in run.stderr
    assert "cd .." in run.stderr
