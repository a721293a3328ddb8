# A machine without a GPU:   docker build --target cpu --build-arg TORCH_INDEX=ADDRESS -t upshift .
# A machine with NVIDIA GPUs: docker build --target cuda -t upshift .
# docs/install.md says how to run it, and what ADDRESS is.
FROM python:3.11-slim AS base
# torch.compile needs a C++ compiler on CPUs, and a C compiler for Triton's launchers on GPUs. Debian's stable release gives one version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 upshift \
    && mkdir /models \
    && chown upshift /models
WORKDIR /opt/upshift
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
WORKDIR /models

FROM base AS cuda
RUN python -m pip install --no-cache-dir -c /opt/upshift/constraints.txt '/opt/upshift[train,serve,gpu]'
USER 1000
EXPOSE 8000
ENTRYPOINT ["upshift"]
CMD ["--help"]

FROM base AS cpu
ARG TORCH_INDEX=""
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX" python -m pip install --no-cache-dir -c /opt/upshift/constraints.txt \
    '/opt/upshift[train,serve,cpu-inference]'
USER 1000
EXPOSE 8000
ENTRYPOINT ["upshift"]
CMD ["--help"]
