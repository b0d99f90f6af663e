"""`import graphattn` is cheap, parts load on first use, and imports point in one direction."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
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


MEASURE = """
import sys, time
import torch
before = set(sys.modules)
start = time.process_time()  # what others do at the same time is not counted
import graphattn
seconds = time.process_time() - start
print(seconds, *sorted(set(sys.modules) - before))
"""
PARTS = """
import graphattn as ga
for part in (
    "distributed", "nn", "data", "models", "spectral", "dynamics", "diagnostics", "train", "plot"
):
    name = "graphattn." + part
    assert name not in sys.modules, name
    assert getattr(ga, part) is sys.modules[name]
    assert getattr(ga, part) is getattr(ga, part)
assert ga.nn.SelfConsensus(8, 2, edge_hidden=4).dim == 8
assert "torch_geometric" in sys.modules
assert "biotite" not in sys.modules, "biotite"  # it loads when a structure is read
print("parts load")
"""


@pytest.fixture(scope="module")
def first_import() -> list[str]:
    """Lines that one new Python prints for several tests, because starting torch takes time.

    The first line has the seconds and the modules that `import graphattn` adds to `import torch`.
    The second says what became of PARTS, which run afterwards.
    """
    last = f"try:\n    exec({PARTS!r})\nexcept Exception as error:\n    print(repr(error))"
    return in_fresh_interpreter(MEASURE + last).splitlines()


@pytest.fixture(scope="module")
def added_modules(first_import) -> set[str]:
    return set(first_import[0].split()[1:])


def test_importing_graphattn_adds_under_half_a_second_to_importing_torch(first_import):
    """The best of three, of which one is enough where it is under half a second."""
    found = [float(first_import[0].split()[0])]
    while min(found) >= 0.5 and len(found) < 3:
        found.append(float(in_fresh_interpreter(MEASURE).split()[0]))
    assert min(found) < 0.5


@pytest.mark.parametrize(
    "heavy",
    [
        "torch_geometric",
        "scipy",
        "triton",
        "matplotlib",
        "transformers",
        "networkx",
        "sklearn",
        "safetensors",
        "huggingface_hub",
    ],
)
def test_importing_graphattn_pulls_in_nothing_heavy_that_torch_does_not(added_modules, heavy):
    added = {name for name in added_modules if name.split(".")[0] == heavy}
    assert not added


def test_importing_graphattn_adds_its_own_modules_and_the_standard_library_only(added_modules):
    added = {name.split(".")[0] for name in added_modules}
    allowed = set(sys.stdlib_module_names) | {"graphattn", "numpy"}
    finders = {name for name in added if name.startswith("__editable__")}
    assert added - finders <= allowed


def test_parts_load_on_first_use(first_import):
    assert first_import[1:] == ["parts load"]


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
    "bench": {"models", "integrations", "train", "nn", "ops", "graphs", "data", "diagnostics",
              "plot", "kernels", "plain_tables", "graphattn itself"},
    "plain_tables": set(),
    "kernels": set(),
    "version": set(),
}  # fmt: skip
# `spectral.certify` takes layers and models too; these load when it gets one.
LOADED_LATER = {
    "graphattn.spectral.certificates.modules": {"nn", "ops"},
    "graphattn.spectral.certificates.layers": {"nn", "ops"},
    "graphattn.spectral.certificates.frozen_steps": {"nn", "ops"},
}
IMPLEMENTATIONS = {"reference", "structured", "native", "triton", "streaming"}


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


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_downward_only(name):
    folder = folder_of(name)
    if folder == "cli":
        return
    allowed = (
        {"graphs", "ops", "version"} if folder == "graphattn itself" else {folder, *ARROWS[folder]}
    )
    allowed |= LOADED_LATER.get(name, set())
    reached = {folder_of(other) for other in imported_modules(name)}
    assert reached <= allowed


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


@pytest.mark.parametrize("name", sorted(n for n in MODULES if engine_of(n)))
def test_only_the_table_of_backends_chooses_among_the_implementations_of_an_engine(name):
    """reference, structured, triton, ... (files or folders) do not import each other."""
    # The table, front doors, and what torch.compile takes of them.
    front = (".api", ".backends", ".decode", ".candidates", ".compiled", ".flat", ".operators")
    if name.endswith(front):
        return
    own = name.split(".")[3]
    others = {other.split(".")[3] for other in imported_modules(name) if engine_of(other)} - {own}
    allowed = {"structured"} if own == "native" else set()  # whose plans it has other rows for
    assert not others & IMPLEMENTATIONS - allowed
    assert f"{engine_of(name)}.api" not in imported_modules(name)  # no step back up


def test_engines_do_not_import_each_other():
    for name in filter(engine_of, MODULES):
        engines = {engine_of(other) for other in imported_modules(name)} - {None}
        assert engines <= {engine_of(name)}, name


OPTIONAL = ("transformers", "matplotlib", "triton", "biotite", "sklearn", "torch_scatter")


@pytest.mark.parametrize("name", sorted(n for n in MODULES if folder_of(n) in ("graphs", "ops")))
def test_graphs_and_operations_import_no_heavy_package_at_the_top(name):
    """Inside a function, or under TYPE_CHECKING, they may."""
    heavy = {*OPTIONAL, "torch_geometric", "scipy", "networkx"}
    top = set()
    for node in tree_of(MODULES[name]).body:
        if isinstance(node, ast.Import):
            top |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            top.add(node.module.split(".")[0])
    assert not top & heavy


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


@pytest.mark.parametrize("name", sorted(kernel_modules()))
def test_rooms_of_the_kernels_import_downward_only(name):
    room = room_of(name)
    reached = {room_of(other) for other in imported_while_running(name)}
    assert reached <= ({room, *ROOMS[room]} if room else set())


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
