#!/usr/bin/env bash
# publish.sh REGISTRY VERSION DIST IMAGE...: push images, and the chart in DIST, to an OCI registry, and sign them.
#
# Signatures are for digests, never for tags. cosign needs no key if it finds an identity, as in GitHub's workflows;
# COSIGN_FLAGS="--key FILE" signs with a key. Each image gets its SBOM from DIST as an attestation.
set -euo pipefail
registry=$1 version=$2 dist=$3
shift 3
docker=${DOCKER:-docker} cosign=${COSIGN:-cosign}
read -ra flags <<<"${COSIGN_FLAGS-}"

fail() { printf 'publish: %s\n' "$*" >&2; exit 1; }

[ -n "$registry" ] || fail "no registry is named: make publish REGISTRY=registry.example.com/team"
chart=$dist/fleet-operator-$version.tgz
[ -f "$chart" ] || fail "$chart is missing: run 'make chart REGISTRY=$registry' first"

for image; do
	name=${image##*/} name=${name%%:*}
	sbom=$dist/$name-$version.cdx.json
	[ -f "$sbom" ] || fail "$sbom is missing: run 'make sbom' first"
	$docker tag "$image" "$registry/$name:$version"
	$docker push "$registry/$name:$version"
	digest=$($docker inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$registry/$name:$version" |
		grep -m 1 "^$registry/$name@") || fail "'$docker inspect $registry/$name:$version' shows no digest of $registry/$name, expected one after the push: check the output of the push above"
	$cosign sign --yes "${flags[@]}" "$digest"
	$cosign attest --yes "${flags[@]}" --type cyclonedx --predicate "$sbom" "$digest"
done

pushed=$(helm push "$chart" "oci://$registry/charts" 2>&1) || fail "$pushed"
printf '%s\n' "$pushed"
digest=$(sed -n 's/^Digest: *//p' <<<"$pushed")
[ -n "$digest" ] || fail "'helm push' printed no line 'Digest: sha256:…', which is needed to sign the chart: use Helm 3.8 or newer"
$cosign sign --yes "${flags[@]}" "$registry/charts/fleet-operator@$digest"
