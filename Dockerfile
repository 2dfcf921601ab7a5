# Images of mutualrl.
#   docker build --target cpu -t mutualrl:cpu .       the embedded pools, small models
#   docker build --target cuda -t mutualrl:cuda .     GPUs: DeepSpeed and vLLM too (docker run --gpus all --shm-size 16g ...)
#   docker run --rm --user "$(id -u)" -e HOME=/work -v "$PWD:/work" mutualrl:cpu train --regime sgt --pool tiny
FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY recipes recipes
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS cpu
COPY --from=wheel /wheels /wheels
# the wheel says which versions it takes
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && wheel=$(ls /wheels/mutualrl-*.whl) \
    && pip install --no-cache-dir "${wheel}[cloud]" \
    && rm -r /wheels \
    && useradd --create-home --uid 1000 mutualrl \
    && install --directory --owner mutualrl /work
USER 1000
WORKDIR /work
HEALTHCHECK --interval=10m --timeout=2m CMD ["mutualrl", "doctor"]
ENTRYPOINT ["mutualrl"]
CMD ["--help"]

FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04@sha256:c3fde347d52d578c84fd644bc177bc7ec333feaf11550d990da4084d7612e4c7 AS cuda
# versions of the distribution's packages come with its pinned image
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev g++ \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
ENV PATH=/opt/mutualrl/bin:$PATH
# hadolint ignore=DL3013
RUN python3 -m venv /opt/mutualrl \
    && wheel=$(ls /wheels/mutualrl-*.whl) \
    && pip install --no-cache-dir torch==2.13.0 \
    && pip install --no-cache-dir "${wheel}[node,cloud,ray]" \
    && rm -r /wheels \
    && userdel --remove ubuntu \
    && useradd --create-home --uid 1000 mutualrl \
    && install --directory --owner mutualrl /work
USER 1000
WORKDIR /work
HEALTHCHECK --interval=10m --timeout=5m CMD ["mutualrl", "doctor"]
ENTRYPOINT ["mutualrl"]
CMD ["--help"]
