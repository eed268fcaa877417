# Two images: `--target operator` (small: no torch, and no shell) and `--target trainer` (torch, fleet and the examples).
#
# Only features of every builder are used, so `docker build` works without buildx, too. It then builds all stages
# above its target: the operator's come first, so that its build does not include the trainer.
#
# Build arguments:
#   BASE_IMAGE         any Debian-like image with Python 3.11 or newer and its venv module
#   PACKAGES           Debian's packages in the trainer's image; empty if the builder reaches no Debian archive
#   COMPILER           Debian's packages of a C compiler, for the build only; empty in the same case
#   VERSION, REVISION, CREATED   for the images' labels
#   PIP_INDEX_URL, PIP_TRUSTED_HOST, HTTP_PROXY, HTTPS_PROXY, NO_PROXY   where and how pip reaches its index
# While pip runs, it trusts the certificates in .build/ca.crt (`make image CA_BUNDLE=FILE` puts them there) in
# addition to the image's own.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# --- the operator's wheel, rebuilt in a second after each change of code
FROM ${BASE_IMAGE} AS wheels
ARG PIP_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY tools/image/install.sh tools/bootstrap.lock .build/ca.cr[t] /build/
RUN sh /build/install.sh /build/venv /build/bootstrap.lock
COPY operator/pyproject.toml operator/README.md operator/LICENSE /build/operator/
COPY operator/src /build/operator/src
RUN cd /build/operator && /build/venv/bin/hatchling build --target wheel --directory /wheels/operator

# --- operator, without the extras for people's machines: the package kubernetes alone has 118 MB (docs/adr/0008)
FROM ${BASE_IMAGE} AS operator-packages
ARG PIP_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY tools/image/install.sh operator/requirements.lock .build/ca.cr[t] /build/
RUN sh /build/install.sh /opt/fleet /build/requirements.lock
COPY --from=wheels /wheels/operator /build/wheels
RUN /opt/fleet/bin/pip install --quiet --no-deps --no-index /build/wheels/*.whl \
 && /opt/fleet/bin/pip uninstall --quiet --yes setuptools pip

COPY tools/image/root.py /build/
RUN /opt/fleet/bin/python /build/root.py /root-of-image

FROM scratch AS operator
COPY --from=operator-packages /root-of-image /
ENV PATH=/opt/fleet/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The build fails here if a module or library is missing that the operator or a command imports.
RUN ["/opt/fleet/bin/python", "-c", "import ssl, fleet_operator.cli, fleet_operator.handlers, fleet_operator.startup; ssl.create_default_context()"]
RUN ["fleetjob", "--version"]
USER 65532:65532
ENTRYPOINT ["fleetjob"]
CMD ["operator"]
# Last, because they change with each commit.
ARG VERSION
ARG REVISION
ARG CREATED
LABEL org.opencontainers.image.title="fleet-operator" \
      org.opencontainers.image.description="Kubernetes operator that runs FleetJobs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.created="$CREATED"

# --- the trainer's wheel; without a compiler, numpy replaces its C code
FROM wheels AS trainer-wheel
ARG COMPILER="gcc libc6-dev"
RUN [ -z "$COMPILER" ] || command -v cc >/dev/null || { apt-get -qq update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $COMPILER >/dev/null \
 && rm -rf /var/lib/apt/lists/*; }
COPY trainer_image/pyproject.toml trainer_image/hatch_build.py trainer_image/README.md trainer_image/LICENSE /build/trainer/
COPY trainer_image/src /build/trainer/src
RUN cd /build/trainer && /build/venv/bin/hatchling build --target wheel --directory /wheels/trainer

# --- trainer; torch is installed in place and not copied from another stage, because it has 6 GB
FROM ${BASE_IMAGE} AS trainer
ARG PIP_INDEX_URL
ARG PIP_TRUSTED_HOST
LABEL org.opencontainers.image.title="fleet-trainer" org.opencontainers.image.licenses="Apache-2.0"
COPY tools/image/install.sh trainer_image/requirements.lock .build/ca.cr[t] /build/
RUN sh /build/install.sh /opt/fleet /build/requirements.lock && rm -r /build
# torch.compile starts a C++ compiler, which needs Python's headers; Debian's Python has them in a separate
# package. NCCL loads the libraries of InfiniBand and RoCE if they are installed.
ARG PACKAGES="g++ ibverbs-providers libibverbs1 librdmacm1"
RUN [ -z "$PACKAGES" ] || { headers=$(/opt/fleet/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))') \
 && if [ ! -e "$headers/Python.h" ]; then PACKAGES="$PACKAGES libpython3-dev"; fi \
 && apt-get -qq update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $PACKAGES >/dev/null \
 && rm -rf /var/lib/apt/lists/*; }
RUN echo 'fleet:x:65532:65532:fleet:/tmp:/usr/sbin/nologin' >>/etc/passwd \
 && echo 'fleet:x:65532:' >>/etc/group
ENV PATH=/opt/fleet/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY tools/image/fleet_*.py tools/image/fleet_*.pth /build/
COPY --from=trainer-wheel /wheels/trainer /build/wheels
RUN /opt/fleet/bin/pip install --quiet --no-deps --no-index /build/wheels/*.whl \
 && mv /build/fleet_*.* "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
 && rm -r /build
WORKDIR /workspace
COPY examples /workspace/examples
# Scripts save in their working directory.
RUN chown 65532:65532 /workspace
USER 65532:65532
CMD ["python"]
# Last, because they change with each commit.
ARG VERSION
ARG REVISION
ARG CREATED
LABEL org.opencontainers.image.description="PyTorch, the package fleet, and its examples" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.created="$CREATED"
