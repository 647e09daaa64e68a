#!/bin/sh
# Debian packages: libraries that the mooncake transport loads, and what the tests between hosts make their network with.
# Everything else works without them, so this never fails.
set -u
packages="libibverbs1 libnuma1 libcurl4 iproute2"

command -v dpkg-query >/dev/null 2>&1 || exit 0
missing=""
for package in $packages; do
    state=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null)
    [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && apt-get update -qq >&2 &&
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing >/dev/null; then
    echo "installed$missing"
else
    echo "mooncake and its tests need$missing; to install: sudo apt-get install$missing" >&2
fi
