#!/bin/sh
# Recreate requirements.lock from pyproject.toml: exact versions, hashes, nothing about where they came from.
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
"$tools/venv/bin/pip-compile" --quiet --generate-hashes --all-extras --strip-extras --allow-unsafe --all-build-deps \
    --no-header --no-emit-options \
    --output-file "$tools/requirements.lock" "$@" pyproject.toml
cp "$tools/requirements.lock" requirements.lock
# What the build of the metadata leaves here would hide the entry points of what is installed.
rm -rf cdc.egg-info
