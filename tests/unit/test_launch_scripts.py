"""The scripts of launch/ for several nodes: what they refuse, what they start, and when SLURM starts a job again.

`txl`, `pdsh`, `srun` and `scontrol` are stand-ins here. tests/cluster/ and tests/dist/test_schedulers.py use real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
TXL = f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
hosts = open(words[words.index("--hostfile") + 1]).read()
given = open(os.environ["DS_ENV_FILE"]).read() if "DS_ENV_FILE" in os.environ else ""
names = ("GLOO_SOCKET_IFNAME", "NCCL_DEBUG")
json.dump([words, hosts, given, {{name: os.environ.get(name) for name in names}}], open("started.json", "w"))
sys.exit(int(os.environ.get("CODE", "0")))
"""
PDSH = """#!/usr/bin/env bash
hosts=${*: -2:1} command=${*: -1}
for host in ${hosts//,/ }; do
    case $host in
        dead) echo "dead: ssh: connect to host dead port 22: Connection timed out" ;;
        old) bash -c "$command" | sed 's/txl_dist [^ ]*/txl_dist 0.0.1/;s/^/old: /' ;;
        blind) echo "blind: facts unknown torch" ;;
        proud) echo "proud: facts 127.0.0.1 torch" ;;
        *) bash -c "$command" | sed "s/^/$host: /" ;;
    esac
done
"""
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
kills = sys.argv[1] == "--kill-on-bad-exit=1"
assert kills or sys.argv[1:3] == ["--kill-on-bad-exit=0", "--no-kill"]
tasks = [
    subprocess.Popen(
        sys.argv[2 if kills else 3:],
        env=os.environ | {{"SLURM_NODEID": str(node), "TXL_NODE": f"node{{node}}"}},
        start_new_session=True,
    )
    for node in range(2)
]
def pass_on(number, _):
    for task in tasks:
        os.killpg(task.pid, number)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, pass_on)
waiting, codes = list(tasks), []
while waiting:
    pid, status = os.wait()
    (task,) = [one for one in waiting if one.pid == pid]
    waiting.remove(task)
    codes.append(os.waitstatus_to_exitcode(status) % 256 if status & 127 == 0 else 128 + (status & 127))
    if codes[-1] and waiting and kills:  # as the real one: at once, and with no time to save
        os.killpg(waiting[0].pid, signal.SIGKILL)
sys.exit(max(codes))
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then printf '%s\\n' localhost 127.0.0.1; else echo "$@" >>scontrol.log; fi
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(LAUNCH, tmp_path / "launch")
    (tmp_path / "bin").mkdir()
    for name, text in (("txl", TXL), ("pdsh", PDSH), ("srun", SRUN), ("scontrol", SCONTROL), ("deepspeed", "")):
        executable(tmp_path / "bin" / name, text)
    executable(tmp_path / "bin" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "c.toml").touch()
    (tmp_path / "hosts").write_text("# two nodes\nlocalhost slots=2\n\nnode2 slots=3 # a smaller one")
    return tmp_path


def environment(folder: Path, **values: str) -> dict[str, str]:
    ours = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    a_job = ("NCCL", "GLOO", "MASTER_")  # a process group that an earlier test made here leaves them behind
    return {name: value for name, value in os.environ.items() if not name.startswith(a_job)} | ours | values


def multinode(folder: Path, *words: str, **values: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "launch/multinode.sh", *words],
        cwd=folder,
        env=environment(folder, **values),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def started(folder: Path) -> Any:
    return json.loads((folder / "started.json").read_text())


def test_all_nodes_are_started_from_here_with_the_variables_of_one_file(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=2\nnode2 slots=3")
    (folder / ".deepspeed_env").write_text("MINE=1\n")
    words = ["--master_addr", "10.9.9.9", "hosts", "c.toml", "--train.max_steps", "7"]
    done = multinode(folder, *words, GLOO_SOCKET_IFNAME="e1", NCCL_X="a", CODE="75")
    assert (done.returncode, done.stderr) == (75, "")
    words, _hosts, given, _ = started(folder)
    assert words[0] == "launch"
    assert words[words.index("c.toml") :] == ["c.toml", "--train.max_steps", "7"]
    flags = words[1 : words.index("c.toml")]
    expected = "--hostfile hosts --master_addr 10.9.9.9 --master_port 29500 --no_ssh_check --force_multi"
    assert " ".join(flags) == expected
    assert given.splitlines()[:2] == ["MINE=1", "GLOO_SOCKET_IFNAME=e1"]
    assert {"NCCL_DEBUG=WARN", "NCCL_X=a"} <= set(given.splitlines())


def test_byte_order_marks_are_no_part_of_a_machines_or_a_variables_name(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=2\r\nnode2 slots=3\r\n", encoding="utf-8-sig", newline="")
    (folder / ".deepspeed_env").write_text("MINE=1\n", encoding="utf-8-sig")
    done = multinode(folder, "--master_addr", "10.9.9.9", "hosts", "c.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert started(folder)[2].splitlines()[0] == "MINE=1"


def test_one_node_is_started_without_ssh(folder: Path) -> None:
    executable(folder / "bin/pdsh", "#!/bin/sh\nexit 99")
    where = ["--master_addr", "10.0.0.1", "--master_port", "77"]
    words = ["--no_ssh", "--node_rank", "1", *where, "hosts", "c.toml", "--run.dir=r"]
    assert multinode(folder, *words, GLOO_SOCKET_IFNAME="e1").returncode == 0
    (_, *flags), _hosts, given, variables = started(folder)
    expected = "--hostfile hosts --master_addr 10.0.0.1 --master_port 77 --no_ssh --node_rank 1 c.toml --run.dir=r"
    assert flags == expected.split()
    assert (given, variables) == ("", {"GLOO_SOCKET_IFNAME": "e1", "NCCL_DEBUG": "WARN"})


@pytest.mark.parametrize(
    ("hosts", "words", "message"),
    [
        (None, "", "cannot read the hostfile"),
        ("", "", "names no node"),
        ("a slots=1\na slots=1", "", "twice"),
        ("a:1", "", 'not "NAME slots=GPUS"'),
        ("a slots=0", "", 'not "NAME slots=GPUS"'),
        ("a slots=two", "", 'not "NAME slots=GPUS"'),
        ("a slots=1", "--no_ssh", "needs --node_rank, 0 to 0"),
        ("a slots=1", "--no_ssh --node_rank 1", "needs --node_rank, 0 to 0"),
        ("a slots=1", "--node_rank 0", "goes with --no_ssh"),
        ("a slots=1", "--master_addr", "what is needed"),
        ("a slots=1", "--num_gpus 2", "unknown option --num_gpus"),
        ("a slots=1\ndead slots=1", "", "dead: ssh: connect to host dead"),
        ("localhost slots=1\nold slots=1", "--master_addr 10.9.9.9", "old: has"),
        ("localhost slots=1\nblind slots=1", "", "does not know the name localhost"),
        ("localhost slots=1\nproud slots=1", "", "takes localhost for itself"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    folder: Path, hosts: str | None, words: str, message: str
) -> None:
    (folder / "hosts").unlink()
    if hosts is not None:
        (folder / "hosts").write_text(hosts)
    tail = [] if words == "--master_addr" else ["c.toml"]
    done = multinode(folder, *words.split(), "hosts", *tail)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("multinode: ")
    assert not (folder / "started.json").exists()


def test_the_folder_must_be_on_every_node(folder: Path) -> None:
    said = 'echo "localhost: facts 127.0.0.1 x"; echo "node2: cd: no such folder" >&2; exit 1'
    executable(folder / "bin/pdsh", f"#!/bin/sh\n{said}\n")
    done = multinode(folder, "hosts", "c.toml")
    assert (done.returncode, done.stderr.splitlines()[1]) == (2, "  node2: cd: no such folder")


def slurm(folder: Path, **values: str) -> subprocess.Popen[str]:
    given = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "localhost,127.0.0.1"}
    shutil.copy(folder / "launch/slurm.sbatch", folder / "bin/slurm_script")  # SLURM runs a copy, from its spool
    return subprocess.Popen(
        ["bash", str(folder / "bin/slurm_script"), "c.toml"],
        cwd=folder,
        env=environment(folder, **given, **values),
        stderr=subprocess.PIPE,
        text=True,
    )


def requeued(folder: Path) -> bool:
    log = folder / "scontrol.log"
    return log.exists() and log.read_text() == "requeue 17\n"


@pytest.mark.parametrize(
    ("codes", "restarts", "expected", "again"),
    [
        ("0 0", 0, 0, False),
        ("75 75", 999, 75, True),
        ("76 76", 3, None, True),
        ("76 76", 50, None, False),
        ("2 wait", 0, 2, False),
        ("wait 1", 0, 1, False),
        ("75 wait", 999, 75, True),
        ("wait 76", 0, None, True),
        ("kill wait", 0, None, True),
        ("0 late76", 0, 76, True),
        ("0 late76", 50, 76, False),
    ],
)
def test_slurm_starts_a_job_again_that_can_go_on(
    folder: Path, codes: str, restarts: int, expected: int | None, again: bool
) -> None:
    """`wait`: that node still runs when the other one has ended, and is killed by srun.
    `late`: srun has nobody left to kill then, and gives this very code."""
    executable(
        folder / "bin/txl",
        f"#!/usr/bin/env bash\ncodes=({codes}) code=${{codes[$SLURM_NODEID]}}\n"
        "case $code in wait) sleep 30 ;; kill) kill -9 $$ ;;\n"
        "late*) until [ -s slurm-17.code.0 ]; do sleep 0.1; done; sleep 1; exit ${code#late} ;;\n"
        "*) exit $code ;; esac\n",
    )
    process = slurm(folder, SLURM_RESTART_COUNT=str(restarts))
    _, errors = process.communicate(timeout=60)
    assert requeued(folder) == again, errors
    assert process.returncode == expected or (expected is None and process.returncode in (76, 137))
    assert not list(folder.glob("slurm-17*"))


@pytest.mark.parametrize(("number", "again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
@pytest.mark.slow
def test_slurm_passes_the_warning_on_and_waits_for_the_save(folder: Path, number: signal.Signals, again: bool) -> None:
    executable(
        folder / "bin/txl",
        f"#!{sys.executable}\nimport os, signal, sys, time\nfrom pathlib import Path\n"
        "def save(number, _):\n    time.sleep(1)\n    Path(f'saved-{os.environ[\"SLURM_NODEID\"]}').touch()\n"
        "    time.sleep(1)\n    sys.exit(75)\n"
        "for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, save)\n"
        "Path(f'up-{os.environ[\"SLURM_NODEID\"]}').touch()\ntime.sleep(30)\n",
    )
    process = slurm(folder)
    end_s = time.monotonic() + 30
    while len(list(folder.glob("up-*"))) < 2:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    process.send_signal(number)
    time.sleep(0.3)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert len(list(folder.glob("saved-*"))) == 2
    assert requeued(folder) == again


def test_slurm_gives_every_node_its_number_and_the_same_meeting_place(folder: Path) -> None:
    keep = 'echo "$@" >"words-$SLURM_NODEID"; cp "$3" "hosts-$SLURM_NODEID"'
    executable(folder / "bin/txl", f"#!/usr/bin/env bash\n{keep}\n")
    assert slurm(folder, SLURM_GPUS_ON_NODE="4").wait(timeout=60) == 0
    first, second = ((folder / f"words-{node}").read_text().split() for node in (0, 1))
    assert "--master_addr localhost --master_port 20017" in " ".join(first)
    assert [word if word != "1" else "0" for word in second] == first
    assert (folder / "hosts-1").read_text() == "localhost slots=4\n127.0.0.1 slots=4\n"


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ("txl.sif", "apptainer exec --nv --pwd {0} --bind {0}:{0},/data:/data txl.sif bash -c"),
        (
            "hub#txl:1",
            "--container-image=hub#txl:1 --container-mounts={0}:{0},/data:/data --container-workdir={0} bash -c",
        ),
    ],
)
def test_slurm_runs_a_node_in_a_container_with_the_folder_mounted(folder: Path, container: str, expected: str) -> None:
    executable(folder / "bin/srun", '#!/usr/bin/env bash\nshift\necho "$@" >words\n')
    assert slurm(folder, CONTAINER=container, MOUNTS="/data:/data").wait(timeout=60) == 0
    assert (folder / "words").read_text().startswith(expected.format(folder))


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    documents = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8"))
    return {document["kind"]: document for document in documents}


def test_the_parts_of_the_kubernetes_job_fit_together(manifests: dict[str, Any]) -> None:
    service, job = manifests["Service"], manifests["Job"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["NUM_NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(variables["SLOTS"])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    port = service["spec"]["ports"][0]["port"]
    assert port == int(variables["MASTER_PORT"]) == container["ports"][0]["containerPort"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy works with no other"
    by_code = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    actions = {tuple(rule["onExitCodes"]["values"]): rule["action"] for rule in by_code}
    assert actions == {(2,): "FailJob", (75, 76): "Ignore"}
    assert pod["securityContext"]["runAsNonRoot"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["shared-memory"] == "/dev/shm"
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"


def test_without_a_shared_file_system_every_pod_has_a_folder_of_its_own() -> None:
    text = (LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8")
    text = text.replace("          persistentVolumeClaim:\n            claimName: txl", "")
    text = text.replace("          # emptyDir:", "          emptyDir:").replace(
        "          #   sizeLimit:", "            sizeLimit:"
    )
    (job,) = [one for one in yaml.safe_load_all(text) if one["kind"] == "Job"]
    pod = job["spec"]["template"]["spec"]
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes["shared"] == {"emptyDir": {"sizeLimit": "500Gi"}}
    (container,) = pod["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "txl-bucket", "optional": True}}]


def test_kubernetes_waits_longer_than_the_largest_recipe_takes_to_save(manifests: dict[str, Any]) -> None:
    from txl_dist.launcher.launch import GRACE_S

    grace_s = manifests["Job"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    num_parameters, bytes_per_s = 800e6, 100e6
    assert grace_s > num_parameters * 12 / bytes_per_s + GRACE_S


def test_the_container_starts_its_node(folder: Path, manifests: dict[str, Any]) -> None:
    (container,) = manifests["Job"]["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]} | {"JOB_COMPLETION_INDEX": "1"}
    (folder / "configs").mkdir()
    (folder / "configs/wt103_large.toml").touch()
    assert (ROOT / "configs/wt103_large.toml").is_file()
    subprocess.run(container["args"], cwd=folder, env=environment(folder, **variables), check=True, timeout=60)
    words, hosts, _, seen = started(folder)
    assert words[3:10] == ["--master_addr", "txl-0.txl", "--master_port", "29500", "--no_ssh", "--node_rank", "1"]
    assert words[10:] == ["configs/wt103_large.toml", "--run.dir=runs/wt103_large"]
    assert hosts == "txl-0.txl slots=8\ntxl-1.txl slots=8\n"
    assert seen["GLOO_SOCKET_IFNAME"] == "eth0"


def test_every_variable_has_its_reason_above_it() -> None:
    blocks = (LAUNCH / "cluster.env").read_text(encoding="utf-8").split("\n\n")
    named = [block for block in blocks if any(line.startswith(("share ", "export ")) for line in block.splitlines())]
    assert len(named) >= 4
    assert all(block.startswith("#") for block in named)


@pytest.mark.parametrize(
    "name",
    [
        "lint.sh",
        "docs.sh",
        "wheel.sh",
        "multinode.sh",
        "slurm.sbatch",
        "cluster.env",
        "../tools/checks/local_cluster.sh",
    ],
)
def test_shellcheck_finds_nothing(name: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    program = str(shellcheck) if shellcheck.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("needs shellcheck (the dev extra brings it)")
    done = subprocess.run([program, "-x", str(LAUNCH / name)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
