"""tools/setup.py: what it refuses, in which words, and that an old Python can read it.

Mutations that must fail here: the stamp trusted without the hashes; the unfinished marker ignored; the disk check after
the download; a syntax newer than Python 3.8.
"""

import ast
from pathlib import Path

import pytest

from tools import setup

ROOT = Path(__file__).parents[2]


def test_python_3_8_can_parse_it() -> None:
    source = (ROOT / "tools/setup.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))


@pytest.mark.parametrize("system, machine", [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "aarch64")])
def test_other_platforms_are_refused_by_name(system: str, machine: str) -> None:
    with pytest.raises(setup.SetupError, match=f"found {system} on {machine}.*Linux on x86_64"):
        setup.check_machine(system, machine)


def test_linux_on_x86_64_is_accepted() -> None:
    setup.check_machine("Linux", "x86_64")


@pytest.mark.parametrize("version", [(3, 8), (3, 10)])
def test_old_python_is_told_what_to_do(version: tuple[int, int]) -> None:
    with pytest.raises(
        setup.SetupError, match=rf"Python {version[0]}\.{version[1]}.*3\.11 or newer.*make setup PYTHON="
    ):
        setup.use_new_enough_python(version, fixed=True)


@pytest.mark.parametrize("version", [(3, 11), (3, 12), (3, 13)])
def test_new_python_is_used_as_it_is(version: tuple[int, int]) -> None:
    setup.use_new_enough_python(version, fixed=True)


@pytest.mark.parametrize("accel, free, enough", [("cpu", 9.9, False), ("cpu", 10.1, True), ("gpu", 10.1, False)])
def test_disk(accel: str, free: float, enough: bool) -> None:
    if enough:
        setup.check_disk(free * 1e9, accel)
    else:
        with pytest.raises(setup.SetupError, match=rf"{free} GB are free"):
            setup.check_disk(free * 1e9, accel)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A project without .venv; what would be done is written down instead."""
    found: list[str] = []
    (tmp_path / "requirements").mkdir()
    for name in ("cpu", "gpu", "dev"):
        (tmp_path / f"requirements/{name}.txt").write_text(f"{name}==1\n")
    venv = tmp_path / ".venv"

    def make() -> None:
        found.append("venv")
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin/python").touch()

    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "VENV", venv)
    monkeypatch.setattr(setup, "PYTHON", venv / "bin/python")
    monkeypatch.setattr(setup, "STAMP", venv / ".setup.json")
    monkeypatch.setattr(setup, "UNFINISHED", venv / ".setup-unfinished")
    monkeypatch.setattr(setup, "make_venv", make)
    monkeypatch.setattr(setup, "check_disk", lambda free, accel: found.append("disk"))
    monkeypatch.setattr(setup, "install_main", lambda lock: found.append(lock.name))
    monkeypatch.setattr(setup, "pip_install", lambda *arguments: found.append(Path(arguments[-1]).name))
    monkeypatch.setattr(setup, "configure_dvc", lambda: None)
    return found


def test_first_set_up_does_all_and_the_second_nothing(calls: list[str]) -> None:
    setup.set_up("", dev=True)
    assert calls == ["disk", "venv", "cpu.txt", "dev.txt"]
    setup.set_up("", dev=True)
    setup.set_up("", dev=False)
    setup.set_up("cpu", dev=False)
    assert len(calls) == 4


def test_tests_add_only_what_tests_need(calls: list[str]) -> None:
    setup.set_up("", dev=False)
    setup.set_up("", dev=True)
    assert calls == ["disk", "venv", "cpu.txt", "dev.txt"]


def test_changed_lock_is_installed(calls: list[str]) -> None:
    setup.set_up("", dev=True)
    calls.clear()
    (setup.ROOT / "requirements/cpu.txt").write_text("cpu==2\n")
    setup.set_up("", dev=True)
    assert calls == ["cpu.txt"]


def test_interrupted_set_up_starts_clean(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(lock: Path) -> None:
        raise KeyboardInterrupt

    working = setup.install_main
    monkeypatch.setattr(setup, "install_main", stop)
    with pytest.raises(KeyboardInterrupt):
        setup.set_up("", dev=False)
    monkeypatch.setattr(setup, "install_main", working)
    calls.clear()
    setup.set_up("", dev=False)
    assert calls == ["disk", "venv", "cpu.txt"]


def test_another_accelerator_starts_clean_and_is_remembered(calls: list[str]) -> None:
    setup.set_up("cpu", dev=False)
    calls.clear()
    setup.set_up("gpu", dev=False)
    setup.set_up("", dev=False)
    assert calls == ["disk", "venv", "gpu.txt"]


def test_moved_project_starts_clean(calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.set_up("", dev=False)
    calls.clear()
    stamp = setup.STAMP.read_text().replace(str(tmp_path), "/somewhere/else")
    setup.STAMP.write_text(stamp)
    setup.set_up("", dev=False)
    assert calls == ["disk", "venv", "cpu.txt"]


def test_settings_that_lead_pip_elsewhere_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/x")
    monkeypatch.setenv("PIP_TARGET", "/x")
    monkeypatch.setenv("PIP_INDEX_URL", "kept")
    found = setup.clean_environment()
    assert "PYTHONPATH" not in found
    assert "PIP_TARGET" not in found
    assert found["PIP_INDEX_URL"] == "kept"


def test_disk_is_probed_without_leaving_files(tmp_path: Path) -> None:
    assert setup.has_reflinks(tmp_path) in (True, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cpu", "gpu", "dev"])
def test_locks_pin_everything_once_and_name_no_index(name: str) -> None:
    lines = (ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(pin.count("==") == 1 and "://" not in pin and " " not in pin for pin in pins)
    names = [pin.split("==")[0].lower().replace("_", "-") for pin in pins]
    assert len(set(names)) == len(names)
    assert len(pins) >= 15
