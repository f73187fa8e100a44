"""The machine: its software, its memory and GPUs, what other programs take, and estimates."""

import itertools
import json
import os
import platform
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import children
import pytest
import torch
from load_files import write_gguf

from llmcli import OPENMP_THREADS, devices, processor
from llmcli.checkpoints import open_checkpoint
from llmcli.errors import UsageError
from llmcli.kernels import native
from llmcli.limits import free_memory, memory_limit, processors
from llmcli.loading.load import placed_on
from llmcli.measure import machine as module
from llmcli.measure.machine import (
    CpuContention,
    cpu,
    environment,
    machine_devices,
    memory_bytes,
    nvidia_gpus,
)
from llmcli.measure.peaks import resident_bytes
from llmcli.prepare.prepared import prepare
from llmcli.records.document import members
from llmcli.records.info import Device
from llmcli.records.machine import MachineLoad

FORMATS = ("F32", "F16", "BF16", "F64", "Q4_0")
STORED = [set(some) for n in range(4) for some in itertools.combinations(FORMATS, n)]


def device(name, bfloat16):
    return Device(device=name, name="x", total_bytes=1, free_bytes=1, bfloat16=bfloat16)


def from_headers(prepared, device, **options):
    return prepared.precision(device.device, bfloat16=device.bfloat16, **options)


def stub(formats):
    tensors = {one: SimpleNamespace(format=one) for one in formats}
    return SimpleNamespace(tensors=tensors, formats=sorted(formats))


@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize("level", ["avx2", None])
def test_headers_give_the_arithmetic_that_a_run_would_choose(
    tmp_path, monkeypatch, bfloat16, level
):
    monkeypatch.setattr(processor, "has_bfloat16", lambda: bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda on: (8 if bfloat16 else 7, 5))
    monkeypatch.setattr(native, "level", lambda: level)
    file = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    real = prepare(file)
    some = [replace(real, checkpoint=stub(stored), random=True) for stored in STORED] + [real]
    for kind, prepared in itertools.product(("cpu", "cuda", "mps"), some):
        on = torch.device(kind)
        ours = device("cuda:0" if kind == "cuda" else kind, bfloat16 or kind == "mps")
        for dtype, quantize in itertools.product(("auto", "float16"), ("auto", "none", "int4")):
            options = {"dtype": dtype, "quantize": quantize}
            try:
                chosen = placed_on([on], prepared, None, **options).precision
            except UsageError as error:
                with pytest.raises(UsageError, match=re.escape(error.message)):
                    from_headers(prepared, ours, **options)
            else:
                assert from_headers(prepared, ours, **options) == chosen


def test_the_processor_is_the_one_that_runs_see():
    own = cpu()
    assert own.bfloat16 == processor.has_bfloat16()
    assert own.total_bytes is not None
    assert own.free_bytes is not None
    known = devices.available_bytes(torch.device("cpu"))
    assert known is not None
    assert abs(own.free_bytes - known) < 2**30  # others work on this machine meanwhile
    assert machine_devices({"CUDA_VISIBLE_DEVICES": ""})[-1].device == "cpu"


def test_a_cuda_device_is_asked_and_not_the_current_one(monkeypatch):
    """What PyTorch keeps of freed tensors is free."""
    on, said = torch.device("cuda:1"), {"mem_get_info": (5, 100), "get_device_capability": (7, 5)}
    for name, value in (said | {"memory_reserved": 30, "memory_allocated": 10}).items():
        monkeypatch.setattr(torch.cuda, name, lambda asked, value=value: {on: value}[asked])
    assert devices.available_bytes(on) == 25
    assert not devices.multiplies_bfloat16(on)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert devices.multiplies_bfloat16(on)


def test_free_memory_is_within_the_limit_of_the_container(tmp_path):
    assert free_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert free_memory(tmp_path) == 4096 * 1024
    group = tmp_path / "sys/fs/cgroup"
    (group / "memory").mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("100\n")
    assert free_memory(tmp_path) == 4096 * 1024
    (group / "memory.max").write_text("1000100\n")
    assert free_memory(tmp_path) == 1000000
    (group / "memory/memory.limit_in_bytes").write_text("500\n")
    (group / "memory/memory.usage_in_bytes").write_text("700\n")
    assert free_memory(tmp_path) == 0
    assert memory_limit(tmp_path) == 500
    (group / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    assert memory_limit(tmp_path) == 1000100
    (group / "memory.max").write_text("max\n")
    (tmp_path / "proc/meminfo").unlink()
    assert (memory_limit(tmp_path), free_memory(tmp_path)) == (None, None)


@pytest.mark.parametrize("version", [1, 2])
def test_files_kept_in_memory_are_free_in_a_nested_group(tmp_path, version):
    (tmp_path / "proc/self").mkdir(parents=True)
    own = "0::/a/b\n" if version == 2 else "3:cpu:/c\n2:memory:/a/b\n"
    (tmp_path / "proc/self/cgroup").write_text(own)
    group = tmp_path / "sys/fs/cgroup" / ("a" if version == 2 else "memory/a")
    (group / "b").mkdir(parents=True)  # the limit is that of the group above
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    for name, number in zip(names, (1000, 900), strict=True):
        (group / f"memory.{name}").write_text(f"{number}\n")
    total = "" if version == 2 else "total_"
    stat = f"anon 100\n{total}inactive_file 600\n{total}active_file 100\nshmem 100\n"
    (group / "memory.stat").write_text(stat)
    assert free_memory(tmp_path) == 800
    assert memory_limit(tmp_path) == 1000


@pytest.mark.parametrize(("quota", "right"), [
    ("max 100000", 4), ("-1 100000", 4), ("100000 100000", 1), ("250000 100000", 2),
    ("50000 100000", 1), ("900000 100000", 4), ("300000 0", 4), ("", 4),
])  # fmt: skip
@pytest.mark.parametrize("version", [1, 2])
def test_processors_are_within_the_quota_of_a_nested_group(
    tmp_path, monkeypatch, version, quota, right
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5, 7}, raising=False)
    assert processors(tmp_path) == 4
    (tmp_path / "proc/self").mkdir(parents=True)
    own = "0::/a/b\n" if version == 2 else "3:cpu,cpuacct:/a/b\n2:memory:/c\n"
    (tmp_path / "proc/self/cgroup").write_text(own)
    group = tmp_path / "sys/fs/cgroup" / ("a" if version == 2 else "cpu/a")
    (group / "b").mkdir(parents=True)
    if version == 2:
        (group / "cpu.max").write_text(quota + "\n")
        (group / "b/cpu.max").write_text("max 100000\n")
    else:
        for name, number in zip(("quota", "period"), quota.split(), strict=False):
            (group / f"cpu.cfs_{name}_us").write_text(number + "\n")
    assert processors(tmp_path) == right


# what processes in a container with a quota of 1.5 of 4 processors read, each with its own
# variables and options
QUOTA = f"""{children.EACH}
import atexit, builtins, json
file, environ, options = json.loads(words)
os.environ.update(environ)
atexit.register(lambda: print(os.environ.get("OMP_NUM_THREADS"), "====="))
read = builtins.open
os.sched_getaffinity = lambda _: {{0, 1, 2, 3}}
builtins.open = lambda path, *more, **named: read(
    file if str(path) == "/sys/fs/cgroup/cpu.max" else path, *more, **named
)
from llmcli.cli.app import main
sys.exit(main(["env", "--json", *options]))
"""
THREADS = [  # variables and options; the threads of OpenMP and ours, and who says so
    ({}, [], ("1", "1"), "default"),
    ({"OMP_NUM_THREADS": "3"}, [], ("3", "3"), "environment"),
    ({"MKL_NUM_THREADS": "3"}, [], ("None", "3"), "environment"),
    ({}, ["--threads", "3"], ("1", "3"), "flag"),
]


def test_all_threads_follow_the_quota(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    plain = {name: value for name, value in os.environ.items() if name not in OPENMP_THREADS}
    given = [json.dumps([str(tmp_path / "cpu.max"), *case[:2]]) for case in THREADS]
    run = children.run(
        [sys.executable, "-c", QUOTA, *given], env=plain, capture_output=True, text=True
    )
    *found, codes = run.stdout.split(" =====\n")
    assert codes == "exit codes: 0 0 0 0\n", run.stderr
    for said, (_, _, threads, source) in zip(found, THREADS, strict=True):
        document, variable = said.rsplit("\n", 1)
        report = json.loads(document)
        assert report["environment"]["cores"] == 1
        setting = next(one for one in report["settings"] if one["name"] == "threads")
        assert ((variable, setting["value"]), setting["source"]) == (threads, source)


LINES = """0, GPU-aa11, NVIDIA A100-SXM4-80GB, 81920, 80000, 8.0
1, GPU-bb22, Tesla V100-PCIE-16GB, 16384, 123, 7.0
2, GPU-bb33, Odd Card, [N/A], [N/A], [N/A]
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts a program `nvidia-smi` first on the path."""

    def put(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!{sys.executable}\n{script}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    monkeypatch.setattr(module, "torch_version", lambda: "2.13.0+cu130")
    return put


def test_gpus_are_those_that_the_driver_lists(smi, monkeypatch):
    smi(f"import sys\nprint({LINES!r} * ('compute_cap' in sys.argv[1]), end='')")
    first, second, third = nvidia_gpus({})
    assert (first.device, first.name) == ("cuda:0", "NVIDIA A100-SXM4-80GB")
    assert (first.total_bytes, first.free_bytes) == (81920 * 2**20, 80000 * 2**20)
    assert (first.bfloat16, second.bfloat16, first.usable) == (True, False, True)
    assert (third.total_bytes, third.free_bytes, third.bfloat16) == (None, None, False)
    monkeypatch.setattr(module, "torch_version", lambda: "2.13.0+cpu")
    assert [gpu.usable for gpu in nvidia_gpus({})] == [False] * 3


@pytest.mark.parametrize(("chosen", "names"), [
    ("1,0", ["Tesla V100-PCIE-16GB", "NVIDIA A100-SXM4-80GB"]), ("", []), ("-1", []),
    ("0,9,1", ["NVIDIA A100-SXM4-80GB"]), ("GPU-bb33", ["Odd Card"]),
])  # fmt: skip
def test_visible_gpus_are_chosen_and_ordered(smi, chosen, names):
    smi(f"print({LINES!r}, end='')")
    found = nvidia_gpus({"CUDA_VISIBLE_DEVICES": chosen})
    assert [gpu.name for gpu in found] == names
    assert [gpu.device for gpu in found] == [f"cuda:{i}" for i in range(len(names))]


def test_a_driver_that_is_old_fails_or_hangs(smi, monkeypatch):
    smi(
        "import sys\nif 'compute_cap' in sys.argv[1]: sys.exit('not a valid field')\n"
        "print('0, GPU-aa11, Tesla K80, 11441, 11000')"
    )
    (card,) = nvidia_gpus({})  # it does not know the generation
    assert (card.name, card.free_bytes, card.bfloat16) == ("Tesla K80", 11000 * 2**20, False)
    monkeypatch.setattr(module, "_SECONDS", 0.3)
    smi("raise SystemExit('NVIDIA-SMI has failed')")
    assert nvidia_gpus({}) == ()
    smi("import time\ntime.sleep(30)")
    assert nvidia_gpus({}) == ()
    monkeypatch.setenv("PATH", "")
    assert nvidia_gpus({}) == ()


def test_the_header_says_what_torch_and_the_system_say(monkeypatch):
    monkeypatch.setattr(processor, "name", lambda: "any processor")
    header = environment(kernels=("k",))
    assert header.torch == torch.__version__
    assert header.threads == torch.get_num_threads()
    assert header.python == platform.python_version()
    assert header.kernels == ("k",)
    assert header.kernel_level == native.status()
    assert (header.cores, header.processor) == (processors(), "any processor")
    monkeypatch.setattr(module, "memory_limit", lambda: 2**20)  # of a container
    assert memory_bytes() == 2**20
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  555.42.06  Tue Jun 4"
    said = {"/proc/driver/nvidia/version": text}
    monkeypatch.setattr(module, "system_text", said.get)
    assert module._nvidia_driver() == "555.42.06"


TICK = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(others, stolen, own)`: the next reading, 10 seconds after the first."""
    (tmp_path / "proc").mkdir()

    def read(seconds, *, others=0.0, stolen=0.0, own=0.0):
        used = round((others + own) * TICK)
        user, rest = used // 2, used - used // 2
        # processor 7 is not ours: whatever is done there does not matter
        (tmp_path / "proc/stat").write_text(
            f"cpu  9 9 9 9 9 9 9 9 9 9\n"
            f"cpu0 {user} 0 0 777 5 0 0 {round(stolen * TICK)} 0 0\n"
            f"cpu1 0 0 {rest} 777 5 0 0 0 0 0\n"
            f"cpu7 {int(99 * seconds * TICK)} 0 0 0 0 0 0 99 0 0\nintr 12 0\n"
        )
        monkeypatch.setattr(module, "perf_counter", lambda: 100.0 + seconds)
        monkeypatch.setattr(os, "times", lambda: os.times_result((own, 0.0, 0.0, 0.0, seconds)))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.0, 0.0))

    def load(threads=2, **taken):
        read(0)
        begun = CpuContention(tmp_path)
        read(10, **taken)
        return begun.load(threads)

    return load


def test_others_are_what_is_not_our_own_and_the_host_of_a_virtual_machine_counts(machine):
    found = machine(others=9.0, own=11.0)
    assert (found.seconds, found.processors, found.threads) == (10.0, 2, 2)
    assert found.others == pytest.approx(0.9)
    assert (found.stolen, found.load_average) == (0.0, 0.5)
    assert found.slowed
    assert found.words == (
        "other programs took 0.90 of 2 processors: on an idle machine this is faster"
    )
    assert members(found) == vars(found) | {"slowed": True}
    found = machine(others=0.1, stolen=4.0, own=15.0)
    assert found.slowed
    assert "took 0.01 of 2 processors and the virtual machine's host 0.40" in found.words


@pytest.mark.parametrize(("others", "own", "threads", "slowed"), [
    (1.0, 19.0, 2, False), (9.0, 10.0, 2, True), (9.0, 10.0, 1, False),
], ids=["idle", "busy", "a processor to spare is for the others"])
def test_only_who_needs_the_processors_of_others_is_slowed(machine, others, own, threads, slowed):
    assert machine(threads, others=others, own=own).slowed is slowed


def test_without_proc_the_load_average_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    found = CpuContention(tmp_path).load(threads=1)
    assert (found.others, found.stolen, found.load_average) == (None, None, 1.5)
    plain = {"seconds": 1.0, "others": None, "stolen": None}
    assert MachineLoad(**plain, processors=2, threads=1, load_average=1.5).slowed
    assert not MachineLoad(**plain, processors=2, threads=1, load_average=1.1).slowed
    assert not MachineLoad(**plain, processors=2, threads=2, load_average=None).slowed


@pytest.mark.measured
@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the system does not count it")
def test_a_neighbour_is_seen():
    neighbour = children.start([sys.executable, "-c", "while True: pass"])
    begun = CpuContention()
    children.until_computed(neighbour.pid, 0.5)
    assert begun.load(threads=1).others > 0.3


BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import memory_estimate

    monkeypatch.setattr(memory_estimate, "environment", lambda threads: {})
    yield memory_estimate
    for name in ("memory_estimate", "bench_tools"):
        sys.modules.pop(name, None)


@pytest.mark.real
@pytest.mark.measured
@pytest.mark.skipif(resident_bytes() is None, reason="the system does not say what is resident")
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_the_estimate_is_within_a_tenth_of_what_was_held(benchmark, smollm2_path, dtype):
    found = benchmark.measure(str(smollm2_path), dtype, 512, 1, 1)
    load, prefill, decode = found["peaks"]
    assert found["need"]["weights_bytes"] < load <= max(prefill, decode) == found["measured"]
    assert abs(found["ratio"] - 1) <= 0.1  # half for the benchmark: processors differ in libraries


@pytest.mark.parametrize(("ratio", "code"), [(1.04, 0), (0.96, 0), (1.11, 1), (0.89, 1)])
def test_the_benchmark_fails_for_an_estimate_that_is_further_off(
    benchmark, monkeypatch, capsys, ratio, code
):
    def measure(*asked):
        found = {"total": 2**20, "peaks": [2**20] * 3, "measured": 2**20, "ratio": ratio}
        return found | dict(zip(("model", "dtype", "context", "batch"), asked, strict=False))

    monkeypatch.setattr(benchmark, "measure", measure)
    argv = ["x", "--models", "smollm2", "--contexts", "64", "--batches", "1"]
    monkeypatch.setattr(sys, "argv", argv)
    assert benchmark.main() == code
    assert capsys.readouterr().out.count("✗") == 3 * code
