#!/bin/sh
# install.sh VENV LOCK: make a virtual environment and install exactly what a lock file names into it.
#
# Runs inside `docker build`. Certificates in a ca.crt beside this script are trusted in addition to the
# image's own for as long as it runs.
set -eu
here=$(dirname "$0")
if [ -f "$here/ca.crt" ]; then
	PIP_CERT=$(mktemp)
	export PIP_CERT
	trap 'rm -f "$PIP_CERT"' EXIT
	if [ -f /etc/ssl/certs/ca-certificates.crt ]; then cat /etc/ssl/certs/ca-certificates.crt; fi >"$PIP_CERT"
	cat "$here/ca.crt" >>"$PIP_CERT"
fi
python3 -m venv "$1"
# The lock is complete, so pip resolves nothing. It compiles what it installs: containers run with a
# read-only root, where Python cannot keep its bytecode.
"$1/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir --timeout 180 --no-deps --require-hashes --requirement "$2"
