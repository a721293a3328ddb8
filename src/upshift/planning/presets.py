"""Make plans that have a name."""

from __future__ import annotations

from math import gcd

from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.plan import Plan
from upshift.planning.workload import Workload

TRAINER_BATCH = 8  # per_device_train_batch_size of transformers.TrainingArguments


def plain_default(host: Host, profile: ModelProfile, workload: Workload) -> Plan:
    """Return what transformers.Trainer does when nothing is set: fp32, 8 sequences at once, fused AdamW, padding, nothing else.

    A batch stays whole where its loss is not that of its parts.
    """
    splits = profile.isolation.loss_splits
    ranks = gcd(host.num_devices, workload.global_batch) if splits else 1
    mine = workload.global_batch // ranks
    micro_batch = max(size for size in range(1, TRAINER_BATCH + 1) if mine % size == 0) if splits else mine
    return Plan(
        device=host.device,
        host=host.fingerprint,
        model=profile.model_hash,
        sequence_length=workload.sequence_length,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=mine // micro_batch,
        num_processes=ranks,
        threads_per_process=host.cpu.usable_cores if host.cpu else 1,
        attention="sdpa" if "sdpa" in profile.declares.attention_kernels else "eager",
    )
