# The image of docs/many-machines.md: docker build . for TPUs, docker build --build-arg EXTRA=cuda . for GPUs
FROM python:3.12-slim
ARG EXTRA=tpu
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY mars_jax mars_jax
COPY kernels_pallas kernels_pallas
# hadolint ignore=DL3013  # it takes the folder for a package
RUN pip install --no-cache-dir ".[$EXTRA]"
WORKDIR /data
ENTRYPOINT ["mars-jax"]
