"""Guards of the package: what a wheel holds, what an import pulls in, what the code never does.

The rooms lie at the top of the repository and are imported through links. These tests keep them
from ever being installed, or found, under their bare names, which belong to other projects.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src" / "ebbtide"
ROOMS = ("allocator", "bench", "connectors", "kernels", "tiers")

# The supervisors: the only places where any fault at all becomes a miss and a counter.
BROAD_HANDLERS_ALLOWED = {"tiers/supervisor.py", "connectors/supervisor.py"}
# vLLM's pickled hashes are digests of `pickle.dumps`. Nothing is ever unpickled.
DUMPS_ALLOWED = {"allocator/algorithms.py": {"pickle", "pickle.dumps", "pickle.HIGHEST_PROTOCOL"}}
CODE_CARRIERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
}
PICKLING_CACHES = {"diskcache", "joblib", "dill", "cloudpickle", "sqlitedict", "pickledb", "klepto"}


def run_python(code: str, cwd: Path = REPOSITORY, **variables: str) -> str:
    """Return what `code` prints in a fresh interpreter with a safe path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "EBBTIDE_PURE")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what packages are built from."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("src", *ROOMS):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
        shutil.copytree(REPOSITORY / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(REPOSITORY / name, tree / name)
    return tree


def build(tree: Path, kind: str, where: str, **variables: str) -> Path:
    """Return the `wheel` or `sdist` that the build backend makes, without a network."""
    shutil.rmtree(tree / "build", ignore_errors=True)
    code = f"from setuptools import build_meta as b; name = b.build_{kind}({where!r})"
    return tree / where / run_python(f"{code}; print(); print(name)", tree, **variables).split()[-1]


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """Return a wheel of this tree."""
    return build(tree, "wheel", "dist")


def compiled_in(wheel: Path) -> set[str]:
    """Return the names of compiled files in a wheel."""
    return {name for name in names_in(wheel) if name.endswith(".so")}


def test_a_wheel_holds_the_compiled_modules_for_all_later_pythons(
    wheel: Path, compiled: Path
) -> None:
    assert compiled_in(wheel) == {
        "ebbtide/allocator/_block_hash.abi3.so",
        "ebbtide/kernels/_host_copy.abi3.so",
        "ebbtide/tiers/_slab_io.abi3.so",
    }
    assert "-cp311-abi3-" in wheel.name


def test_without_a_compiler_a_wheel_holds_everything_else(tree: Path, wheel: Path) -> None:
    without = build(tree, "wheel", "without", CC="/nonexistent/cc")
    assert names_in(without) == names_in(wheel) - compiled_in(wheel)


def test_a_wheel_for_every_platform_can_be_built(tree: Path, wheel: Path) -> None:
    pure = build(tree, "wheel", "pure", EBBTIDE_PURE="1")
    assert pure.name.endswith("-py3-none-any.whl")
    assert names_in(pure) == names_in(wheel) - compiled_in(wheel)


def test_a_source_distribution_has_what_a_wheel_is_built_from(
    tree: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(build(tree, "sdist", "sources")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    for source in ("allocator/block_hash.c", "kernels/host_copy.c"):
        assert (unpacked / "src" / "ebbtide" / source).is_file()
    assert names_in(build(unpacked, "wheel", "dist")) == names_in(wheel)


def names_in(wheel: Path) -> set[str]:
    """Return the paths of all files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_a_wheel_holds_one_top_level_name(wheel: Path) -> None:
    names = names_in(wheel)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ebbtide"}
    assert "ebbtide/py.typed" in names


def test_a_wheel_holds_all_modules_of_the_tree(wheel: Path) -> None:
    names = names_in(wheel)
    missing = [name for name, _ in package_sources() if f"ebbtide/{name}" not in names]
    assert not missing


def test_an_installed_wheel_holds_files_and_no_links(wheel: Path, tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-compile",
            "--target",
            str(tmp_path),
            str(wheel),
        ],
        check=True,
        timeout=60,
    )
    found = list((tmp_path / "ebbtide").rglob("*"))
    assert {tmp_path / "ebbtide" / room for room in ROOMS} <= set(found)
    assert not [path for path in found if path.is_symlink()]
    assert (tmp_path / "ebbtide" / "tiers" / "__init__.py").is_file()


def test_p83_the_wheel_needs_no_cache_library_that_pickles(wheel: Path) -> None:
    (metadata,) = [name for name in names_in(wheel) if name.endswith(".dist-info/METADATA")]
    with zipfile.ZipFile(wheel) as archive:
        headers = Parser().parsestr(archive.read(metadata).decode())
    needed = {
        re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower()
        for requirement in headers.get_all("Requires-Dist") or []
    }
    assert "msgspec" in needed
    assert not needed & PICKLING_CACHES


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_linked_relatively(room: str) -> None:
    link = PACKAGE / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{room}"


def test_there_are_no_other_links() -> None:
    assert sorted(path.name for path in PACKAGE.iterdir() if path.is_symlink()) == sorted(ROOMS)


def test_rooms_are_not_importable_under_their_bare_names() -> None:
    # Somebody may well have installed another project's `kernels`; ours must not be the answer.
    found = run_python(
        "from importlib.util import find_spec\n"
        f"for name in {ROOMS!r}:\n"
        "    spec = find_spec(name)\n"
        "    if spec: print(name, spec.origin, list(spec.submodule_search_locations or []))\n"
    )
    assert str(REPOSITORY) not in found
    installed = {line.split()[0] for line in found.splitlines()}
    assert all("site-packages" in line for line in found.splitlines()), installed


def test_importing_ebbtide_pulls_in_neither_torch_nor_an_http_stack() -> None:
    unwanted = {"torch", "vllm", "starlette", "uvicorn", "aiohttp", "prometheus_client"}
    assert run_python(f"import sys, ebbtide; print({unwanted!r} & sys.modules.keys())") == "set()\n"


@pytest.mark.parametrize("room", ROOMS)
def test_importing_a_room_pulls_in_no_tensor_library_and_has_no_version(room: str) -> None:
    code = (
        f"import sys, ebbtide.{room} as room;"
        "print({'torch', 'vllm'} & sys.modules.keys(), hasattr(room, '__version__'))"
    )
    assert run_python(code) == "set() False\n"


def package_sources() -> list[tuple[str, str]]:
    """Return all modules of the package as (path inside the package, text)."""
    found = []
    for top in (PACKAGE, *(REPOSITORY / room for room in ROOMS)):
        for path in sorted(top.rglob("*.py")):
            base = PACKAGE if top == PACKAGE else REPOSITORY
            name = path.relative_to(base).as_posix()
            if top != PACKAGE or name.partition("/")[0] not in ROOMS:
                found.append((name, path.read_text(encoding="utf-8")))
    return found


def broad_handlers(text: str) -> list[int]:
    """Return the lines of handlers that catch everything and do not raise it again."""
    broad = {"Exception", "BaseException"}
    lines = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        is_broad = any(
            kind is None or (isinstance(kind, ast.Name) and kind.id in broad) for kind in caught
        )
        last = node.body[-1]
        raises_again = isinstance(last, ast.Raise) and last.exc is None
        if is_broad and not raises_again:
            lines.append(node.lineno)
    return lines


def code_carriers(text: str) -> list[str]:
    """Return what `text` uses that can run code found in data, as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        elif isinstance(node, ast.Name) and node.id in ("eval", "exec"):
            found.append(f"{node.lineno}: {node.id}")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            refused = isinstance(node.value, ast.Constant) and node.value.value is False
            found += [] if refused else [f"{node.lineno}: allow_pickle"]
        carriers = [name for name in names if name.partition(".")[0] in CODE_CARRIERS]
        found += [f"{getattr(node, 'lineno', 0)}: {name}" for name in carriers]
    return found


def test_only_supervisors_catch_everything() -> None:
    broad = {name: lines for name, text in package_sources() if (lines := broad_handlers(text))}
    assert not {name: lines for name, lines in broad.items() if name not in BROAD_HANDLERS_ALLOWED}


def test_p80_p83_nothing_in_the_package_runs_code_found_in_data() -> None:
    found = {}
    for name, text in package_sources():
        allowed = DUMPS_ALLOWED.get(name, set())
        if used := [use for use in code_carriers(text) if use.split(": ")[1] not in allowed]:
            found[name] = used
    assert not found


def test_the_guards_see_all_rooms() -> None:
    tops = {name.partition("/")[0] for name, _ in package_sources()}
    assert {*ROOMS, "cli.py", "config.py", "errors.py"} <= tops


@pytest.mark.parametrize(
    ("handler", "is_broad"),
    [
        ("except Exception: pass", True),
        ("except Exception as error: print(error)", True),
        ("except BaseException: pass", True),
        ("except (OSError, Exception): pass", True),
        ("except: pass", True),
        ("except BaseException: raise", False),
        ("except Exception as error: raise OSError from error", True),
        ("except OSError: pass", False),
    ],
)
def test_the_guard_sees_a_broad_handler(handler: str, is_broad: bool) -> None:
    assert bool(broad_handlers(f"try:\n    work()\n{handler}\n")) is is_broad


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("import pickle", ["1: pickle"]),
        ("from pickle import loads", ["1: pickle.loads"]),
        ("import pickle as p, marshal", ["1: pickle", "1: marshal"]),
        ("pickle.loads(data)", ["1: pickle.loads"]),
        ("pickle.dumps(data)", ["1: pickle.dumps"]),
        ("eval(data)", ["1: eval"]),
        ("exec(data)", ["1: exec"]),
        ("numpy.load(file, allow_pickle=True)", ["1: allow_pickle"]),
        ("numpy.load(file, allow_pickle=False)", []),
        ("model.eval()", []),
        ("import pickletools_free", []),
    ],
)
def test_the_guard_sees_what_runs_code(code: str, seen: list[str]) -> None:
    assert code_carriers(code) == seen
