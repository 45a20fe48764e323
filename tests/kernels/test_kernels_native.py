"""Compiling the kernel: once for a machine, whole or not at all, and what is said where it cannot be done."""

import shutil
import subprocess
import threading

import pytest

from hf_kvcache.kernels import native

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }'


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source that compiles fast instead of the kernel, and a cache folder of its own."""
    if native.library() is None:
        pytest.skip("this machine has no C++ compiler")
    (tmp_path / "decode.cpp").write_text(SOURCE)
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    monkeypatch.setattr(native, "_SOURCES", ("decode.cpp",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_library", native._library.__wrapped__)
    return tmp_path / "decode.cpp"


@pytest.fixture
def compilations(monkeypatch):
    """The paths that were compiled."""
    paths, compile_ = [], native._compile

    def counted(command, path):
        paths.append(path)
        compile_(command, path)

    monkeypatch.setattr(native, "_compile", counted)
    return paths


def test_compiles_once_and_again_when_the_source_changes(source, compilations, monkeypatch):
    assert native.library().answer() == 42
    assert native.library().answer() == 42
    assert len(compilations) == 1
    assert compilations[0].parent == source.parent / "cache" / "hf_kvcache" / "kernels"
    source.write_text(SOURCE.replace("42", "43"))
    assert native.library().answer() == 43
    assert len(compilations) == 2


def test_another_compiler_or_cpu_gets_a_library_of_its_own(source, compilations, monkeypatch):
    native.library()
    run = native._run
    monkeypatch.setattr(
        native, "_run", lambda command: run(command) + (b"#define __OTHER__" if "-dM" in command else b"")
    )
    native.library()
    assert len(set(compilations)) == 2


def test_processes_at_the_same_time_compile_once(source, compilations):
    threads = [threading.Thread(target=native.library) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 1
    assert [path.suffix for path in sorted(compilations[0].parent.iterdir())] == [".so", ".lock"]


def test_no_compiler(source, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert native._library() == (None, "none of g++, clang++ is installed and CXX is not set")


def test_a_source_that_does_not_compile_leaves_nothing(source):
    source.write_text("int answer() { return nonsense; }")
    library, reason = native._library()
    assert library is None
    assert "error" in reason
    assert "nonsense" in reason
    assert not list((source.parent / "cache").rglob("*.so"))


def test_a_compiler_that_cannot_run(source, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++ -O1")
    library, reason = native._library()
    assert library is None
    assert "/nowhere/g++" in reason


def test_a_compiler_without_openmp_serves_one_thread(source, monkeypatch):
    run = subprocess.run

    def without_openmp(command, **kwargs):
        if "-fopenmp" in command:
            return subprocess.CompletedProcess(command, 1, b"", b"error: unsupported option '-fopenmp'")
        return run(command, **kwargs)

    monkeypatch.setattr(subprocess, "run", without_openmp)
    assert native.library().answer() == 42


def test_a_folder_that_cannot_be_written(source, monkeypatch):
    blocker = source.parent / "file"
    blocker.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    library, reason = native._library()
    assert library is None
    assert str(blocker) in reason
