"""Messages of a user's type checker, for installations from a wheel and for editable ones."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import graphattn as ga

pytest.importorskip("mypy")
pytest.importorskip("setuptools")

TOP = Path(ga.__file__).resolve().parents[1]
if not (TOP / "build_backend.py").exists():
    pytest.skip("graphattn is not installed from a checkout", allow_module_level=True)

# Every line, and what must be said of it.
USER = [
    ("import torch, graphattn as ga", None),
    ("from graphattn.kernels.shared.launch import why_not_heads", None),
    ("layer = ga.nn.KrauseAttention(16, heads=4, top_k=3)", None),
    ("reveal_type(layer)", r'type is "graphattn\.nn\.krause\.KrauseAttention"'),
    ("reveal_type(layer.config)", r'type is "(builtins\.)?dict\[(builtins\.)?str, Any\]"'),
    ("reveal_type(ga.window_path_graph(9, 2))", r"graphattn\.graphs\.token_graph\.TokenGraph"),
    ("reveal_type(ga.models.SequenceEncoder(9, 8, 1, 2))", r"models\.encoder\.SequenceEncoder"),
    ("reveal_type(type(layer).from_pretrained('folder'))", r"nn\.krause\.KrauseAttention"),
    ("reveal_type(ga.spectral.fiedler_value)", r"graphattn\.graphs\.token_graph\.TokenGraph"),
    ("reveal_type(ga.dynamics.simulate)", r"Trajectory"),
    ("reveal_type(ga.diagnostics.record_attention)", r"AttentionRecord"),
    ("reveal_type(ga.train.mask_tokens)", r"Tensor"),
    ("reveal_type(ga.data.read_fasta)", r"FastaRecord"),
    ("reveal_type(ga.plot.adjacency)", r"TokenGraph"),
    ("reveal_type(ga.save)", r"torch\.nn\.modules\.module\.Module"),
    ("reveal_type(ga.load)", r"device"),
    ("ga.nn.KrauseAttenton(16, 4)", r'error: .*"KrauseAttenton".*\[attr-defined\]'),
    ("ga.widow_path_graph(9, 2)", r'error: .*"widow_path_graph".*\[attr-defined\]'),
    ("ga.nn.KrauseAttention(16, num_heads=4)", r"error: .*num_heads.*\[call-arg\]"),
    ("ga.nn.KrauseAttention('wide', 4)", r"error: .*\[arg-type\]"),
    ("why_not_heads('nonsense', 3)", r"error: .*\[arg-type\]"),
]
SOURCE = "\n".join(line for line, _ in USER) + "\n"


def backend_in(folder: Path) -> ModuleType:
    """The build backend of a copy of the checkout, so that nothing is built in the checkout."""
    for name in ("graphattn", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(TOP / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "build_backend.py", "MANIFEST.in"):
        shutil.copy(TOP / name, folder / name)
    spec = importlib.util.spec_from_file_location("copied_backend", folder / "build_backend.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(checkout: Path, hook: str, out: Path) -> Path:
    """The wheel that a hook of the backend builds, as pip calls it: in a process of its own."""
    out.mkdir()
    code = f"import sys; sys.path.insert(0, '.'); import build_backend as b; b.{hook}(sys.argv[1])"
    run = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def environment_with(wheel: Path, folder: Path) -> Path:
    """The Python of a new environment that has the wheel, and sees this one's other packages."""
    venv.create(folder, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def checked(cache: Path, cwd: Path, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(cache), "--no-pretty", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    backend_in(folder)
    return folder


@pytest.mark.long
def test_a_user_s_type_checker_sees_every_type_and_every_mistake(checkout, tmp_path, request):
    cache = request.config.cache.mkdir("mypy")
    (tmp_path / "user.py").write_text(SOURCE)
    for hook in ("build_editable", "build_wheel"):
        wheel = built(checkout, hook, tmp_path / hook)
        python = environment_with(wheel, tmp_path / f"{hook}-environment")
        told = checked(cache, tmp_path, "--python-executable", str(python), "user.py")
        for number, (line, expected) in enumerate(USER, 1):
            said = [row for row in told.splitlines() if row.startswith(f"user.py:{number}:")]
            said = [row for row in said if "note: See" not in row and "defined in" not in row]
            if expected is None:
                assert not said, (hook, line, said)
            else:
                assert re.search(expected, " ".join(said)), (hook, line, told)
                assert ("error:" in " ".join(said)) == ("error" in expected), (hook, line, said)


@pytest.mark.long
def test_our_own_lint_looks_into_the_kernels(tmp_path, request):
    """Types of kernels are checked with the settings of pyproject.toml, as `make lint` does."""
    file = tmp_path / "call.py"
    file.write_text(
        "from graphattn.kernels.shared.launch import why_not_heads\nwhy_not_heads('nonsense', 3)\n"
    )
    told = checked(
        request.config.cache.mkdir("mypy-own"),
        TOP,
        "--config-file",
        str(TOP / "pyproject.toml"),
        str(file),
    )
    assert re.search(r'call\.py:2: error: Argument 1 to "why_not_heads"', told), told


@pytest.mark.long
def test_the_links_are_the_layout_of_a_wheel(checkout, tmp_path):
    wheel = built(checkout, "build_wheel", tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        installed = {name for name in archive.namelist() if name.startswith("graphattn/")}
    built(checkout, "build_editable", tmp_path / "editable")
    links = checkout / "build" / "types" / "graphattn-stubs"
    compiled = (".cpp", ".h", ".so")  # no type checker reads them, and wheels may have none
    installed = {name for name in installed if not name.endswith(compiled)}
    seen = set()
    for folder, _, files in os.walk(links, followlinks=True):
        for file in files:
            path = Path(folder, file).relative_to(links)
            if "__pycache__" not in path.parts and path.suffix not in compiled:
                name = "__init__.py" if str(path) == "__init__.pyi" else path.as_posix()
                seen.add(f"graphattn/{name}")
    assert seen == installed


@pytest.mark.long
def test_the_editable_wheel_lists_the_path_file_and_python_imports_no_link(checkout, tmp_path):
    wheel = built(checkout, "build_editable", tmp_path / "editable")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        record = next(name for name in names if name.endswith("/RECORD"))
        listed = [line.split(",")[0] for line in archive.read(record).decode().splitlines()]
    assert sorted(listed) == sorted(names)
    python = environment_with(wheel, tmp_path / "environment")
    code = "import graphattn, graphattn.kernels as k; print(graphattn.__file__, k.__file__)"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    folders = [Path(file).parent for file in run.stdout.split()]
    assert folders == [checkout / "graphattn", checkout / "kernels"]


def test_an_editable_installation_works_where_no_link_can_be_made(tmp_path, monkeypatch):
    backend = backend_in(tmp_path)

    def refused(*args, **kwargs):
        raise OSError("a privilege is missing")

    def setuptools_own(folder, *_):
        with zipfile.ZipFile(Path(folder, "own.whl"), "w") as archive:
            archive.writestr("own.dist-info/RECORD", "")
        return "own.whl"

    monkeypatch.setattr(Path, "symlink_to", refused)
    monkeypatch.setattr(backend.build_meta, "build_editable", setuptools_own)
    assert backend.build_editable(str(tmp_path)) == "own.whl"
    with zipfile.ZipFile(tmp_path / "own.whl") as archive:
        assert archive.namelist() == ["own.dist-info/RECORD"]
