#!/usr/bin/env bash
# run.sh VERB...: `make VERB...` in a fresh clone, on a machine that has git, make, Python and Go, and nothing else.
#
# That machine is a container of BASE_IMAGE with an empty home. It gets the commit that is checked out here,
# not the working tree; Go comes read-only from this machine, as do the settings of proxies, pip, uv and Go,
# and the certificates in CA_BUNDLE. The container goes when its verbs have ended, and when this script does.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
root=$(git -C "$here" rev-parse --show-toplevel)
docker=${DOCKER:-docker}
name=fleet-newcomer-$$
work=$(mktemp -d)

say() { printf 'newcomer: %s\n' "$*" >&2; }
finish() {
	local status=$?
	trap '' INT TERM HUP
	$docker rm --force "$name" >/dev/null 2>&1 || true
	rm -rf "$work"
	exit $status
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

$docker info >/dev/null 2>&1 || { say "$docker does not answer: start its daemon, or name another command by DOCKER"; exit 1; }
[ -z "$(git -C "$root" status --porcelain)" ] || say "what is not committed is left out"
git -c advice.detachedHead=false clone --quiet --bare --depth 1 "file://$root" "$work/checkout"
: >"$work/ca.crt"
if [ -n "${CA_BUNDLE-}" ]; then cp "$CA_BUNDLE" "$work/ca.crt"; fi
chmod -R a+rX "$work"

settings=(PYTEST_FLAGS PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST PIP_DEFAULT_TIMEOUT
	UV_DEFAULT_INDEX UV_INDEX_URL UV_EXTRA_INDEX_URL UV_HTTP_TIMEOUT)
proxies=(HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy)
handed_in=("${settings[@]/#/--env=}" "${proxies[@]/#/--env=}")
if command -v go >/dev/null; then
	handed_in+=(--volume="$(go env GOROOT):/usr/local/go:ro")
	for setting in GOPROXY GOSUMDB GOPRIVATE GONOPROXY GONOSUMDB GOINSECURE; do
		export "$setting=$(go env "$setting")"
		handed_in+=(--env="$setting")
	done
else
	say "there is no Go here to hand in: programs without a pinned download cannot be got"
fi

$docker build --quiet --build-arg BASE_IMAGE="${BASE_IMAGE:?}" "${proxies[@]/#/--build-arg=}" \
	--tag fleet-newcomer - <"$here/Dockerfile" >/dev/null

# In the container. Its /dev/shm is as large as on a machine, where docker would give 64 MiB.
say "make $* at $(git -C "$root" rev-parse --short HEAD), as an ordinary user on ${BASE_IMAGE}"
started=$SECONDS
# shellcheck disable=SC2016 # the container's shell reads them
$docker run --rm --name "$name" --shm-size 4g "${handed_in[@]}" --volume "$work:/handed-in:ro" fleet-newcomer \
	bash -euc '
		export PATH=$PATH:/usr/local/go/bin
		if [ -s /handed-in/ca.crt ]; then
			cat /etc/ssl/certs/ca-certificates.crt /handed-in/ca.crt >/tmp/ca.crt
			export SSL_CERT_FILE=/tmp/ca.crt PIP_CERT=/tmp/ca.crt GIT_SSL_CAINFO=/tmp/ca.crt
		fi
		git -c advice.detachedHead=false clone --quiet file:///handed-in/checkout fleetjob
		cd fleetjob
		make "$@"' make "$@" &
wait $! || { status=$?; say "make $* FAILED, exit status $status, after $((SECONDS - started)) s"; exit $status; }
say "make $* passed after $((SECONDS - started)) s"
