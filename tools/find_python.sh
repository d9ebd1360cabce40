#!/bin/sh
# Prints the first interpreter that can run Speculant: Python 3.11 or newer, with venv and pip.
# PYTHON=... in the environment is the only candidate when it is set.
set -u

usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
    if usable "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done

cat >&2 <<EOF_MESSAGE
No usable interpreter among: ${PYTHON:-python3, python3.11 to python3.14, python}.
Speculant needs Python 3.11 or newer with the venv and ensurepip modules.
  Fix: install one (Debian and Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python ...
EOF_MESSAGE
exit 1
