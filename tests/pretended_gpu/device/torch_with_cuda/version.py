"""What torch/version.py says in a build for CUDA."""

cuda: str | None = '13.0'  # fmt: skip
