#!/bin/sh
# Makes an image that stands in for the one that the Dockerfile starts from, where none can be
# pulled: Debian with its Python 3.11 under the name `python`, whose pip takes its packages from one
# place alone.
#
#   stand_in.sh IMAGE WHEELS DIRECTORY
#
# IMAGE: its name. WHEELS: what pip shall take for --find-links. DIRECTORY: for temporary files.
set -eu
image=$1 wheels=$2 directory=$3

echo "[global]
no-index = true
find-links = $wheels" > "$directory/pip.conf"
# Nothing of this outlives a test, so dpkg need not wait for the disk.
TMPDIR=$directory mmdebstrap --quiet --variant=essential --include=libstdc++6,passwd,python3-venv \
    --aptopt='Acquire::Retries "3"' --aptopt='Apt::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' \
    --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook='ln -s /usr/bin/python3 "$1/usr/local/bin/python"' \
    --customize-hook="copy-in $directory/pip.conf /etc" \
    bookworm "$directory/base.tar"
docker import "$directory/base.tar" "$image"
rm "$directory/base.tar"
