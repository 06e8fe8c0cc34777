# docker build -t retrain .                           for CPUs, about 2 GB
# docker build -t retrain --build-arg TORCH=cu128 .   for CUDA: any folder of download.pytorch.org/whl
# docker run retrain                                  trains the lab model
# docker run --gpus all --user "$(id -u)" -v "$PWD:/work" retrain my.toml
FROM python:3.11-slim-bookworm AS build
ARG TORCH=cpu
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY retrain retrain
RUN python -m venv /opt/retrain \
    && /opt/retrain/bin/pip install --no-cache-dir --constraint constraints.txt \
        --extra-index-url "https://download.pytorch.org/whl/$TORCH" ".[report]"

FROM python:3.11-slim-bookworm
ARG TORCH=cpu
# Triton compiles its launchers with a C compiler.
# hadolint ignore=DL3008
RUN if [ "$TORCH" != cpu ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --create-home --uid 1000 retrain && install --directory --owner=retrain --mode=0777 /work
COPY --from=build /opt/retrain /opt/retrain
COPY --chown=retrain examples/lab.toml /work/examples/lab.toml
ENV PATH=/opt/retrain/bin:$PATH HF_HOME=/work/.huggingface
USER 1000
WORKDIR /work
ENTRYPOINT ["retrain"]
CMD ["examples/lab.toml"]
