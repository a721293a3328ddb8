"""Keep a probe's result for this process's host without measuring: the CPU's probe would take a minute for a GPU's products.

The rates are those of the product's data sheet, so that plans are ranked as on the real GPU.
"""

import os
from importlib.metadata import version

from upshift.hardware import detect, probe_cache
from upshift.hardware.probe import with_measured
from upshift.hardware.spec import Host, Measured, Rates
from upshift.settings import read_settings


def measured(host: Host, *, budget_seconds: float) -> Host:
    assert host.gpu is not None and host.cpu is not None
    unlisted = Rates(fp32=1e13, fp32_medium=5e13, bf16=1e14, fp16=1e14, memory_bytes_per_second=1e12)  # such as a MIG instance
    cpu = Rates(fp32=1e11, fp32_medium=1e11, bf16=1e11, fp16=1e10, memory_bytes_per_second=1e10)
    return with_measured(host, Measured(
        torch_version=version("torch"), transformers_version=version("transformers"), num_threads=host.cpu.usable_cores,
        cpu=cpu, gpu=(host.gpu.peak or unlisted).changed(fp8=None, int8=None), dispatch_seconds=4e-6,
        gpu_dispatch_seconds=5e-6, host_to_device_bytes_per_second=2e10, first_touch_seconds_per_byte=2e-10,
        base_resident_bytes=4 * 10**8, compiler=False, gpu_compiler=False, probe_seconds=1.0, core_share=1.0,
    ))  # fmt: skip


probe_cache.probe = measured
host = probe_cache.measure(detect())
probe_cache.measure(host.one_device())  # for a process that sees one of several
# They have no exchanges, so they would be valid for ten minutes only: a file of tomorrow is valid for a day more.
for path in (read_settings().cache_dir / "probe").iterdir():
    tomorrow = path.stat().st_mtime + 86400
    os.utime(path, (tomorrow, tomorrow))
print(host.device, host.num_devices, host.gpu.name if host.gpu else None)
