#!/bin/sh
# Recreate requirements.lock from pyproject.toml: exact versions, hashes, nothing about where they came from; and
# requirements-run.lock, the part of it that the image installs, without servers, tests and tools.
# Versions that still fit are kept; `sh compose/lock.sh --upgrade` takes the newest. Run it with an early Python 3.11
# (PYTHON=/usr/bin/python3.11): some packages ask for more on the oldest patch releases, and a lock with hashes must
# name all of it.
set -eu
cd "$(dirname "$0")/.."
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3.11}" -m venv "$tools/venv"
"$tools/venv/bin/pip" install --quiet pip-tools
cp requirements.lock "$tools/requirements.lock"

pin() {
    "$tools/venv/bin/pip-compile" --quiet --generate-hashes --strip-extras --allow-unsafe --all-build-deps \
        --no-header --no-emit-options "$@" pyproject.toml
}

pin --all-extras --output-file "$tools/requirements.lock" "$@"
cp "$tools/requirements.lock" requirements.lock
pin --extra spark --extra serve --constraint requirements.lock --output-file "$tools/requirements-run.lock"
cp "$tools/requirements-run.lock" requirements-run.lock
# What the build of the metadata leaves here would hide the entry points of what is installed.
rm -rf cdc.egg-info
