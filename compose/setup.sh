#!/bin/sh
# Make .venv from requirements.lock; say what to install when the machine lacks something. Called by `make setup`.
set -eu
cd "$(dirname "$0")/.."

refuse() {
    printf 'setup: %s\nhint: %s\n' "$1" "$2" >&2
    exit 3
}

say() {
    printf 'setup: %s\n' "$1"
}

# Run a command; one that takes long prints a dot every few seconds.
patiently() {
    (while sleep 4 >/dev/null 2>&1; do printf .; done) &
    dots=$!
    trap 'kill "$dots" 2>/dev/null || true' EXIT
    "$@"
    kill "$dots"
    trap - EXIT
    printf '\n'
}

for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "${python:-}" ] || refuse "no Python 3.11 or newer" "apt install python3 python3-venv, or brew install python@3.12; then: make setup"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    refuse "$python has no venv module" "apt install python3-venv; then: make setup"

java=java
[ -z "${JAVA_HOME:-}" ] || java=$JAVA_HOME/bin/java
major=$("$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1) || true
[ "${major:-0}" -ge 17 ] ||
    refuse "no Java 17 or newer (looked at $java)" "apt install openjdk-17-jre-headless, or brew install openjdk@17; then: make setup"

free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
[ "$free_kb" -ge 2097152 ] ||
    refuse "only $((free_kb / 1024)) MiB free here, the environment needs 2048" "free some space, or move the checkout; then: make setup"

# An environment of another Python can't be upgraded in place.
if ! { [ -x .venv/bin/python ] && .venv/bin/python -c 'import pip' 2>/dev/null; }; then
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
say "installing $(grep -c == requirements.lock) packages of requirements.lock into .venv (a minute)"
patiently .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
say "archiving the classes of Spark: each start of it takes a third less time"
patiently .venv/bin/python -m cdc.runtime.class_archive ||
    say "the archive wasn't written, so Spark starts slower; to try again: .venv/bin/python -m cdc.runtime.class_archive"
touch .venv/.installed
say "done; the command is .venv/bin/cdc"
