# Two images: `--target operator` (small, no torch) and `--target trainer` (torch, fleet and the examples).
#
# Only what every builder knows is used, so that `docker build` without buildx works as well. It builds
# each stage above its target: the operator stands first.
#
# Build arguments:
#   BASE_IMAGE         any Debian-like image with Python 3.11 or newer and its venv module
#   PACKAGES           Debian's packages in the trainer's image; empty where the builder reaches no archive of them
#   COMPILER           Debian's packages of a C compiler, for the build only; empty as above
#   PIP_INDEX_URL, PIP_TRUSTED_HOST, HTTP_PROXY, HTTPS_PROXY, NO_PROXY   where and how pip reaches its index
# A bundle of certificates at .build/ca.crt (`make image CA_BUNDLE=FILE` puts it there) is trusted while
# pip runs, beside the image's own; nothing needs it afterwards.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# --- the operator's wheel; rebuilt at each change of code, in a second
FROM ${BASE_IMAGE} AS wheels
ARG PIP_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY tools/image/install.sh tools/bootstrap.lock .build/ca.cr[t] /build/
RUN sh /build/install.sh /build/venv /build/bootstrap.lock
COPY operator/pyproject.toml /build/operator/pyproject.toml
COPY operator/src /build/operator/src
RUN cd /build/operator && /build/venv/bin/hatchling build --target wheel --directory /wheels/operator

# --- operator, without the extras of people's machines: the package kubernetes alone has 118 MB (docs/adr/0008)
FROM ${BASE_IMAGE} AS operator-packages
ARG PIP_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY tools/image/install.sh operator/requirements.lock .build/ca.cr[t] /build/
RUN sh /build/install.sh /opt/fleet /build/requirements.lock
COPY --from=wheels /wheels/operator /build/wheels
RUN /opt/fleet/bin/pip install --quiet --no-deps --no-index /build/wheels/*.whl \
 && /opt/fleet/bin/pip uninstall --quiet --yes setuptools pip

FROM ${BASE_IMAGE} AS operator
LABEL org.opencontainers.image.title="fleet-operator" org.opencontainers.image.licenses="Apache-2.0"
RUN echo 'fleet:x:65532:65532:fleet:/nonexistent:/usr/sbin/nologin' >>/etc/passwd \
 && echo 'fleet:x:65532:' >>/etc/group
ENV PATH=/opt/fleet/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=operator-packages /opt/fleet /opt/fleet
USER 65532:65532
ENTRYPOINT ["fleetjob"]
CMD ["operator"]

# --- the trainer's wheel, of which C is compiled where a compiler is; numpy does its work otherwise
FROM wheels AS trainer-wheel
ARG COMPILER="gcc libc6-dev"
RUN [ -z "$COMPILER" ] || command -v cc >/dev/null || { apt-get -qq update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $COMPILER >/dev/null \
 && rm -rf /var/lib/apt/lists/*; }
COPY trainer_image/pyproject.toml trainer_image/hatch_build.py /build/trainer/
COPY trainer_image/src /build/trainer/src
RUN cd /build/trainer && /build/venv/bin/hatchling build --target wheel --directory /wheels/trainer

# --- trainer: torch's layer is installed in place, never copied from another stage: it has 6 GB
FROM ${BASE_IMAGE} AS trainer
ARG PIP_INDEX_URL
ARG PIP_TRUSTED_HOST
LABEL org.opencontainers.image.title="fleet-trainer" org.opencontainers.image.licenses="Apache-2.0"
COPY tools/image/install.sh trainer_image/requirements.lock .build/ca.cr[t] /build/
RUN sh /build/install.sh /opt/fleet /build/requirements.lock && rm -r /build
# torch.compile starts a C++ compiler, which wants Python's headers: Debian's Python has them in a package of
# their own. NCCL loads the libraries of InfiniBand and RoCE where it finds them.
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
