#!/bin/sh
# Write requirements.lock anew from pyproject.toml: exact versions, hashes, nothing about where they came from.
set -eu
cd "$(dirname "$0")/.."
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
.venv/bin/python -m venv "$tools/venv"
"$tools/venv/bin/pip" install --quiet pip-tools
"$tools/venv/bin/pip-compile" --quiet --generate-hashes --extra dev --strip-extras --allow-unsafe --all-build-deps \
    --no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --output-file "$tools/requirements.lock" "$@" pyproject.toml
cp "$tools/requirements.lock" requirements.lock
