"""Which GPU: the name rule, the facts of known GPUs, the probe child, and visible devices."""

import dataclasses
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from tuner import device as dev
from tuner.device import DeviceError

SLICE = "NVIDIA A100-SXM4-80GB MIG 1g.10gb"


@pytest.mark.parametrize(
    ("query", "name", "expected"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("A100", "NVIDIA A100-PCIE-40GB", True),
        ("a100-40gb", "NVIDIA A100-SXM4-40GB", True),
        ("a100-40gb", "NVIDIA A100-SXM4-80GB", False),
        ("a100", "NVIDIA A10", False),
        ("a10", "NVIDIA A100-SXM4-80GB", False),
        ("a10", "NVIDIA A10G", False),
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("h100", "NVIDIA H100 PCIe", True),
        ("h100", "NVIDIA GH200 480GB", False),
        ("h200", "NVIDIA GH200 480GB", False),
        ("gh200", "NVIDIA H200", False),
        ("h200", "NVIDIA H200", True),
        ("h200", "NVIDIA H200 NVL", True),
        ("l4", "NVIDIA L4", True),
        ("l4", "NVIDIA L40", False),
        ("l4", "NVIDIA L40S", False),
        ("l40", "NVIDIA L40S", False),
        ("l40s", "NVIDIA L40", False),
        ("rtx4090", "NVIDIA GeForce RTX 4090", True),
        ("rtx-4090", "NVIDIA GeForce RTX 4090", True),
        ("RTX 4090", "NVIDIA GeForce RTX 4090", True),
        ("4090", "NVIDIA GeForce RTX 4090", True),
        ("rtx409", "NVIDIA GeForce RTX 4090", False),
        ("rtx4090ti", "NVIDIA GeForce RTX 4090", False),
        # A family: the laptop's own name keeps its tables apart from the desktop's.
        ("rtx4090", "NVIDIA GeForce RTX 4090 Laptop GPU", True),
        ("rtx 4090 laptop", "NVIDIA GeForce RTX 4090", False),
        ("b200", "NVIDIA B200", True),
        ("b200", "NVIDIA GB200", False),
        ("NVIDIA_A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", True),  # a folder of tables
        ("", "NVIDIA H200", False),
        ("-", "NVIDIA H200", False),
        ("a100", SLICE, False),
        ("a100-80gb", SLICE, False),
        (SLICE, SLICE, True),
        ("a100 1g.10gb", SLICE, True),
        ("a100 mig", SLICE, True),
        ("a100 2g.20gb", SLICE, False),
        (SLICE, "NVIDIA A100-SXM4-80GB", False),
        ("a100 mig", "NVIDIA A100-SXM4-80GB", False),
        ("h100", "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", False),
        ("a100x", "GRID A100X-10C", False),  # a virtual GPU is a slice too
    ],
)
def test_name_rule(query: str, name: str, expected: bool) -> None:
    assert dev.matches(query, name) is expected


def test_every_known_gpu_matches_its_own_name() -> None:
    for gpu in dev.known_gpus():
        assert [other.name for other in dev.known_gpus() if dev.matches(gpu.name, other.name)] == [
            gpu.name
        ]


# capability, SMs, KiB of shared memory per block, MiB of L2, TB/s, bf16 TFLOP/s
@pytest.mark.parametrize(
    ("query", "figures"),
    [
        ("a100", ((8, 0), 108, 163, 40, 2.04, 312)),
        ("a100-80gb", ((8, 0), 108, 163, 40, 2.04, 312)),
        ("a100-40gb", ((8, 0), 108, 163, 40, 1.56, 312)),
        ("h100", ((9, 0), 132, 227, 50, 3.35, 989)),
        ("h200", ((9, 0), 132, 227, 60, 4.8, 989)),
        ("l4", ((8, 9), 58, 99, 48, 0.30, 121)),
        ("rtx4090", ((8, 9), 128, 99, 72, 1.01, 165)),
        ("b200", ((10, 0), 148, 227, 126, 8.0, 2250)),
    ],
)
def test_figures(query: str, figures: tuple[Any, ...]) -> None:
    gpu = dev.from_data_file(query)
    capability, sms, shared, cache, bandwidth, flops = figures
    assert (gpu.capability, gpu.sms) == (capability, sms)
    assert gpu.shared_per_block == shared * 1024
    # Every block reserves 1 KiB of its SM's shared memory.
    assert gpu.shared_per_sm == (shared + 1) * 1024
    assert gpu.l2_bytes == cache * 2**20
    assert gpu.bandwidth == pytest.approx(bandwidth * 1e12, rel=5e-3)
    assert gpu.bf16_flops == flops * 1e12
    assert gpu.registers_per_sm == 65536
    ada = capability == (8, 9)
    assert (gpu.threads_per_sm, gpu.blocks_per_sm) == ((1536, 24) if ada else (2048, 32))
    assert not gpu.attached
    assert gpu.uuid is None


def test_every_entry_says_where_its_figures_come_from() -> None:
    entries = json.loads(dev.GPU_FACTS.read_text())["gpus"]
    assert all(len(entry["source"]) > 20 for entry in entries)


def test_data_file_refusals() -> None:
    with pytest.raises(DeviceError, match="no known GPU matches 'v100'; known: NVIDIA A100"):
        dev.from_data_file("v100")
    with pytest.raises(DeviceError, match="'80gb' matches different GPUs: NVIDIA A100-SXM4-80GB, "):
        dev.from_data_file("80gb")
    with pytest.raises(DeviceError, match=r"no known GPU matches 'a100 1g\.10gb'"):
        dev.from_data_file("a100 1g.10gb")


def properties(**changes: Any) -> Any:
    """What PyTorch says of an H200."""
    values = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "shared_memory_per_block_optin": 232448,
        "shared_memory_per_multiprocessor": 233472,
        "L2_cache_size": 62914560,
        "total_memory": 150109880320,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048,
        "memory_clock_rate": 3201000,
        "memory_bus_width": 6016,
        "uuid": "d5a3c1c4-0000-0000-0000-000000000001",
    }
    return types.SimpleNamespace(**{**values, **changes})


def test_described_gpu_keeps_its_own_numbers() -> None:
    gpu = dev.describe(properties(), "580.1")
    known = dev.from_data_file("h200")
    own = {"bandwidth": 2 * 3201e6 * 6016 / 8, "driver": "580.1", "attached": True}
    uuid = "GPU-d5a3c1c4-0000-0000-0000-000000000001"
    assert gpu == dataclasses.replace(known, uuid=uuid, **own)


def test_described_gpu_without_a_memory_clock_takes_the_known_bandwidth() -> None:
    bare = properties(memory_clock_rate=0)
    del bare.uuid
    gpu = dev.describe(bare, None)
    assert (gpu.bandwidth, gpu.uuid, gpu.driver) == (4.8e12, None, None)


def test_unknown_gpu_takes_the_most_careful_figures_of_its_peers() -> None:
    gpu = dev.describe(
        properties(name="NVIDIA H300", multi_processor_count=66, memory_bus_width=0), None
    )
    assert gpu.name == "NVIDIA H300"
    assert gpu.bandwidth == 3.35e12
    assert gpu.bf16_flops == pytest.approx(989e12 / 2)
    # A capability that no known GPU has: the lowest of all.
    gpu = dev.describe(properties(name="New", major=12, minor=1, memory_bus_width=0), None)
    assert (gpu.capability, gpu.bandwidth, gpu.blocks_per_sm) == ((12, 1), 0.3e12, 24)


def test_described_slice_has_a_mig_uuid() -> None:
    gpu = dev.describe(properties(name=SLICE, multi_processor_count=14), None)
    assert (gpu.uuid or "").startswith("MIG-d5a3")


def child(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def gpu_named(name: str, sms: int = 132) -> dev.DeviceInfo:
    return dataclasses.replace(dev.from_data_file("h200"), name=name, sms=sms, attached=True)


def test_probe_without_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = dev.probe()
    assert result.devices == ()
    assert "CUDA does not start: " in (result.reason or "")
    assert "\n" not in (result.reason or "")


@pytest.mark.gpu
def test_probe_reads_the_attached_gpu() -> None:
    result = dev.probe()
    assert result.reason is None
    gpu = dev.same_model(result.devices)
    assert gpu.attached
    assert gpu.driver
    assert gpu.uuid in dev.driver_uuids()
    for known in dev.known_gpus():
        if known.name == gpu.name:
            assert (gpu.capability, gpu.sms, gpu.l2_bytes) == (
                known.capability,
                known.sms,
                known.l2_bytes,
            )
            assert gpu.shared_per_block == known.shared_per_block
            assert gpu.bandwidth == pytest.approx(known.bandwidth, rel=0.1)


def test_probe_reads_the_childs_last_line() -> None:
    answer = json.dumps({"devices": [dataclasses.asdict(gpu_named("A"))], "reason": None})
    result = dev.probe(child(f"print('a library says hello'); print({answer!r})"))
    assert result == dev.ProbeResult((gpu_named("A"),))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ('print(\'{"devices": [], "reason": "broken"}\')', "broken"),
        ('print(\'{"devices": [], "reason": null}\')', "no GPU is visible"),
        ("", "reading the GPU gave no answer but ''"),
        ("print('segfault')", "gave no answer but 'segfault'"),
        ("print('[1]')", "gave no answer but '[1]'"),
        ('print(\'{"devices": [{"name": 1}]}\')', "gave no answer but"),
        ("import sys; sys.exit('driver too old')", "ended with exit status 1: driver too old"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV: no message"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "gave no answer but"),
    ],
)
def test_probe_says_what_is_wrong(code: str, reason: str) -> None:
    result = dev.probe(child(code))
    assert result.devices == ()
    assert reason in (result.reason or "")


def test_probe_of_a_missing_program(monkeypatch: pytest.MonkeyPatch) -> None:
    # The module's command is read at the call, so that a test may replace it.
    monkeypatch.setattr(dev, "PROBE_COMMAND", ("/no/such/python",))
    assert dev.probe().reason == "cannot start /no/such/python: No such file or directory"


def test_hanging_probe_is_ended_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(mark)!r}, 'w').write(str(p.pid))\n"
        "time.sleep(60)"
    )
    begin = time.monotonic()
    result = dev.probe(child(code), seconds=2.0)
    assert result.reason == "the GPU did not answer within 2 s"
    assert time.monotonic() - begin < 20
    pid = int(mark.read_text())
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        # Orphans stay zombies where nobody reaps them.
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the grandchild outlived the probe")


def test_probe_ignores_a_folder_named_like_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no safe path")
    (tmp_path / "tuner").mkdir()
    (tmp_path / "tuner" / "__init__.py").write_text("raise SystemExit('the wrong tuner')")
    monkeypatch.chdir(tmp_path)
    assert "wrong tuner" not in (dev.probe().reason or "")


def test_child_keeps_the_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code = "import json, os; print(json.dumps({'reason': os.environ['CUDA_VISIBLE_DEVICES']}))"
    assert dev.probe(child(code)).reason == "0"


def test_one_model_per_run() -> None:
    assert dev.same_model([gpu_named("A"), gpu_named("A")]) == gpu_named("A")
    with pytest.raises(DeviceError, match="no GPU, wanted at least one"):
        dev.same_model([])
    with pytest.raises(DeviceError, match=r"different GPU models .* A \(132 SMs\), B \(132 SMs\)"):
        dev.same_model([gpu_named("A"), gpu_named("B"), gpu_named("A")])
    with pytest.raises(DeviceError, match=r"A \(114 SMs\), A \(132 SMs\); select one model"):
        dev.same_model([gpu_named("A"), gpu_named("A", 114)])


UUIDS = [
    "GPU-aaaa0000-0000-0000-0000-000000000000",
    "GPU-aabb1111-0000-0000-0000-000000000000",
    "MIG-cccc1111-0000-0000-0000-000000000000",
    "MIG-cccc2222-0000-0000-0000-000000000000",
    "GPU-dddd2222-0000-0000-0000-000000000000",
    "GPU-eeee3333-0000-0000-0000-000000000000",
]


# Case 18 and the forms around it.
@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, [0, 1, 4, 5]),
        ("2,3", [4, 5]),
        ("3,2", [5, 4]),
        (" 0 , 1 ", [0, 1]),
        (UUIDS[1], [1]),
        ("GPU-dd", [4]),
        (UUIDS[3], [3]),
        ("MIG-cccc1", [2]),
        (f"0,{UUIDS[2]},GPU-eeee", [0, 2, 5]),
    ],
)
def test_visible_devices(value: str | None, chosen: list[int]) -> None:
    found = dev.visible_devices(value, UUIDS)
    assert found == tuple(UUIDS[index] for index in chosen)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "is empty and hides every GPU"),
        ("  ", "is empty and hides every GPU"),
        ("3,3", "'3' is GPU-eeee3333-.* named twice"),
        ("0,GPU-aaaa", "'GPU-aaaa' is GPU-aaaa0000-.* named twice"),
        ("4", "'4' is no device here; wanted an index below 4"),
        ("-1", "'-1' is no device here"),
        ("0,", "'' is no device here"),
        ("0,x", "'x' is no device here"),
        ("GPU-aa", "means several devices: GPU-aaaa0000-.*, GPU-aabb1111-"),
        ("MIG-cccc", "means several devices"),
        ("MIG-dddd", "'MIG-dddd' is no device here"),
        ("GPU-", "means several devices"),
        ("\u0663", "is no device here"),
    ],
)
def test_visible_devices_refusals(value: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        dev.visible_devices(value, UUIDS)


def test_visible_devices_without_a_gpu() -> None:
    assert dev.visible_devices(None, []) == ()
    with pytest.raises(DeviceError, match="below 0 or one of: none, there is no GPU"):
        dev.visible_devices("0", [])


LISTING = f"""\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: {UUIDS[0]})
GPU 1: NVIDIA A100-SXM4-80GB (UUID: {UUIDS[1]})
  MIG 3g.40gb     Device  0: (UUID: {UUIDS[2]})
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the driver's tool, first on the path."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tool


def test_driver_uuids(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dev.driver_uuids() == UUIDS[:3]
    nvidia_smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert dev.driver_uuids() == []
    nvidia_smi.write_text("#!/bin/sh\nexec sleep 30\n")
    assert dev.driver_uuids(seconds=0.3) == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert dev.driver_uuids() == []


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "CUDA_VISIBLE_DEVICES is empty and hides every GPU"),
        ("1,1", "named twice"),
        ("2", "wanted an index below 2 or one of: GPU-aaaa0000"),
        (UUIDS[5], "is no device here"),
        ("1,0", "asked"),
        (UUIDS[2], "asked"),
    ],
)
def test_probe_refuses_a_wrong_selection(
    value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    result = dev.probe(child('print(\'{"reason": "asked"}\')'))
    assert result.devices == ()
    assert reason in (result.reason or "")


def test_importing_starts_no_cuda() -> None:
    code = "import tuner.device, torch; assert not torch.cuda.is_initialized()"
    subprocess.run(child(code), check=True, timeout=120)


@pytest.mark.parametrize(
    ("own", "others"),
    [(11, ["12 (300 MiB)"]), (99, ["12 (300 MiB)"]), (None, ["11 (500 MiB)", "12 (300 MiB)"])],
)
def test_other_processes_on_the_gpu(
    own: int | None, others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 99 is not listed: the driver prints the host's ids, and one of them is ours.
    listed = "GPU-a, 11, 500 MiB\nGPU-a, 12, 300 MiB\nGPU-b, 13, 100 MiB\nnonsense\n"
    monkeypatch.setattr(dev, "_nvidia_smi", lambda arguments, seconds: listed)
    assert dev.other_processes("GPU-a", own) == others
    monkeypatch.setattr(dev, "_nvidia_smi", lambda arguments, seconds: None)
    assert dev.other_processes("GPU-a", own) == []
