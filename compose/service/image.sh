#!/bin/sh
# Build the image `cdc` from compose/service/Dockerfile. Called by `make image`.
# Docker builds it where an engine answers. Otherwise buildah does, as root but without a daemon, on a base that
# mmdebstrap makes of Debian's packages, so no registry is needed; then `cdc --version` is run as in a container.
set -eu
cd "$(dirname "$0")/../.."

if docker info >/dev/null 2>&1; then
    exec docker build -f compose/service/Dockerfile -t cdc .
fi
for tool in buildah mmdebstrap; do
    command -v "$tool" >/dev/null || {
        printf 'image: no Docker engine answers, and there is no %s\n' "$tool" >&2
        printf 'hint: apt install buildah mmdebstrap; then, as root: make image\n' >&2
        exit 3
    }
done
[ "$(id -u)" -eq 0 ] || {
    printf 'image: buildah needs root here\nhint: sudo make image\n' >&2
    exit 3
}

export BUILDAH_ISOLATION=chroot
work=$(mktemp -d)
container=
trap 'rm -rf "$work"; [ -z "$container" ] || buildah rm "$container" >/dev/null' EXIT

if ! buildah inspect --type image localhost/debian:bookworm-slim >/dev/null 2>&1; then
    mmdebstrap --quiet --variant=minbase bookworm "$work/base.tar"
    # The image trusts whom this machine trusts: a company's proxy may have its own authority.
    mkdir "$work/authorities"
    awk -v folder="$work/authorities" '/BEGIN CERT/ {n++} n {print > (folder "/" n ".crt")}' /etc/ssl/certs/ca-certificates.crt
    printf 'FROM scratch\nADD base.tar /\nCOPY authorities /usr/local/share/ca-certificates\n' >"$work/Dockerfile"
    buildah build --quiet -t localhost/debian:bookworm-slim "$work"
fi
buildah build --build-arg BASE=localhost/debian:bookworm-slim -f compose/service/Dockerfile -t localhost/cdc .

# As its user, with a read-only root and an empty /tmp. buildah can't run read-only, and chroot is all that this needs.
container=$(buildah from localhost/cdc)
root=$(buildah mount "$container")
# shellcheck disable=SC2016  # the inner shell has its own arguments
unshare --mount sh -euc '
    mount --bind "$1" "$1"
    mount -o remount,bind,ro "$1"
    mount -t tmpfs tmpfs "$1/tmp"
    printf "image: localhost/cdc, "
    exec chroot --userspec=10001:10001 "$1" env PATH=/opt/cdc/bin:/usr/bin:/bin cdc --version
' sh "$root"
