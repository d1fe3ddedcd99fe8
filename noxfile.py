"""Sessions of `make test-versions`: build, import and test oases with every torch and Python that it promises.

Each session installs its torch, builds oases against it in isolation, by `pip install .`, and runs the main tests in
a folder that holds no oases, so that the installed one is tested. docs/versions.md has the results. Interpreters are
taken from PATH; a torch with CUDA is 5 GB on disk, and its environment is removed after tests that passed.
"""

import shutil
from pathlib import Path

import nox

VERSIONS = [
    *(("3.11", torch) for torch in ("2.11", "2.12", "2.13", "2.14", "2.15")),
    ("3.10", "2.14"),  # torch 2.15 has no wheel for Python 3.10
    ("3.12", "2.15"), ("3.13", "2.15"),
]  # fmt: skip
TESTS = [
    "core/schedule", "core/execution", "core/blocks/test_exactness.py", "checkpoint/test_checkpoint.py",
    "distributed/test_fsdp.py", "distributed/test_gradient_averaging.py", "distributed/test_gradient_clipping.py",
    "graph/test_trace.py", "kernels/test_norm.py", "layers/test_chunks.py", "layers/test_embedding.py",
    "layers/test_linear.py", "layers/test_styles.py", "moe/test_moe_layer.py", "sparse/test_sparse_hook.py",
    "test_cli.py", "train/test_precision.py", "train/test_trainer.py",
]  # fmt: skip
UNEDITED_MODELS = ["autotp/test_logits.py", "autotp/test_parallelize.py", "autotp/test_pretrained.py"]
TREE = ("python_tests", "reliability", "benchmarks", "examples", "pyproject.toml")
"""Files that tests read besides the package."""

nox.options.error_on_missing_interpreters = True
nox.options.stop_on_first_error = False


@nox.session
@nox.parametrize("python,torch", VERSIONS)
def versions(session: nox.Session, torch: str) -> None:
    """Build against one torch, import, run the main tests."""
    session.env["PYTHONPATH"] = None  # it may name a tree with an oases of its own
    session.install(f"torch=={torch}.*", *nox.project.dependency_groups(nox.project.load_toml(), "dev", "test"))
    session.install(".")
    tree = Path(session.create_tmp()) / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    for name in TREE:
        (shutil.copytree if Path(name).is_dir() else shutil.copy)(name, tree / name)
    session.chdir(tree)
    session.run("pip", "check")
    session.run("oases", "--version")
    # transformers needs Python 3.11.
    tests = [*TESTS, *([] if session.python == "3.10" else UNEDITED_MODELS)]
    paths = [f"python_tests/{name}" for name in tests]
    session.run("python", "-m", "pytest", "-q", "--durations=5", "-m", "not gpu and not slow", *paths)
    shutil.rmtree(session.virtualenv.location)
