"""Made-up machines: a root tree, an NVML, a torch; with two GPUs that no prebuilt torch covers."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from uneven.hardware.gpus import Gpu, GpuReport
from uneven.hardware.system import Cpu, System
from uneven.hardware.torchbuild import TorchBuild

GIB = 2**30
RTX_5060_TI = Gpu(0, "NVIDIA GeForce RTX 5060 Ti", 16 * GIB, "sm_120", 4608, "GPU-aaaa", False)
GTX_1060 = Gpu(1, "NVIDIA GeForce GTX 1060 6GB", 6 * GIB, "sm_61", 1280, "GPU-bbbb", None)
TWO_GPUS = GpuReport((RTX_5060_TI, GTX_1060), "580.82.07", "13.0")
NO_GPUS = GpuReport(reason="no NVIDIA driver (libnvidia-ml.so not found)")

CPU_BUILD = TorchBuild(True, "2.13.0+cpu", gloo=True, threads=2, cpu_capability="DEFAULT")
CU128_ARCHS = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CU128_BUILD = TorchBuild(True, "2.10.0+cu128", "12.8", None, CU128_ARCHS, True, "2.27.5", True, 8, "AVX2")


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def make_system(flags: tuple[str, ...] = (), platform: str = "Linux", **changes: Any) -> System:
    values: dict[str, Any] = {
        "platform": platform,
        "os_name": "Debian 12" if platform == "Linux" else f"{platform} 1",
        "kernel": "6.1",
        "python": "3.11.7",
        "cpu": Cpu("i9-9900K", "x86_64", flags),
        "available_cores": tuple(range(16)),
        "cpu_quota": None,
        "memory_bytes": 24 * GIB,
        "memory_available_bytes": 20 * GIB,
        "memory_is_limited": False,
        "is_container": False,
    }
    return System(**(values | changes))


def make_pynvml(gpus: tuple[Gpu, ...] = TWO_GPUS.gpus, init_error: Exception | None = None) -> ModuleType:
    """A pynvml whose second GPU, as a real Pascal, knows no MIG; names are bytes as in old bindings."""
    fake: Any = ModuleType("pynvml")

    def fail_or_pass() -> None:
        if init_error is not None:
            raise init_error

    def mig_mode(gpu: Gpu) -> list[int]:
        if gpu.mig is None:
            raise RuntimeError("Not Supported")
        return [int(gpu.mig), int(gpu.mig)]

    fake.nvmlInit = fail_or_pass
    fake.nvmlShutdown = lambda: None
    fake.nvmlDeviceGetCount = lambda: len(gpus)
    fake.nvmlDeviceGetHandleByIndex = lambda index: gpus[index]
    fake.nvmlDeviceGetName = lambda gpu: gpu.name.encode()
    fake.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(total=gpu.memory_bytes)
    fake.nvmlDeviceGetCudaComputeCapability = lambda gpu: (int(gpu.sm[3:-1]), int(gpu.sm[-1]))
    fake.nvmlDeviceGetNumGpuCores = lambda gpu: gpu.cores
    fake.nvmlDeviceGetUUID = lambda gpu: gpu.uuid
    fake.nvmlDeviceGetMigMode = mig_mode
    fake.nvmlSystemGetDriverVersion = lambda: "580.82.07"
    fake.nvmlSystemGetCudaDriverVersion_v2 = lambda: 13000
    return fake


def make_torch(
    version: str = "2.10.0+cu128",
    cuda: str | None = "12.8",
    archs: tuple[str, ...] = CU128_ARCHS,
    gpus: tuple[Gpu, ...] = (),
    start_error: str | None = None,
) -> ModuleType:
    """A torch with these GPUs visible, in CUDA's order."""
    fake: Any = ModuleType("torch")

    def properties(index: int) -> SimpleNamespace:
        if start_error is not None:
            raise RuntimeError(start_error)
        gpu = gpus[index]
        assert gpu.sm is not None
        assert gpu.uuid is not None
        uuid, number = gpu.uuid.removeprefix("GPU-"), gpu.sm[3:]
        return SimpleNamespace(
            name=gpu.name,
            major=int(number[:-1]),
            minor=int(number[-1]),
            total_memory=gpu.memory_bytes,
            uuid=uuid,
        )

    fake.__version__ = version
    fake.version = SimpleNamespace(cuda=cuda, hip=None)
    fake._C = SimpleNamespace(_cuda_getArchFlags=lambda: " ".join(archs)) if cuda else SimpleNamespace()
    fake.cuda = SimpleNamespace(
        get_arch_list=list,
        device_count=lambda: len(gpus) or int(start_error is not None),
        get_device_properties=properties,
        nccl=SimpleNamespace(version=lambda: (2, 27, 5)),
    )
    fake.distributed = SimpleNamespace(is_nccl_available=lambda: cuda is not None, is_gloo_available=lambda: True)
    fake.backends = SimpleNamespace(cpu=SimpleNamespace(get_cpu_capability=lambda: "AVX2"))
    fake.get_num_threads = lambda: 8
    return fake
