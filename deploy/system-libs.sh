#!/bin/sh
# Debian packages whose libraries the mooncake transport loads. Everything else works without them, so this never fails.
set -u
libs="libibverbs1 libnuma1 libcurl4"

command -v dpkg-query >/dev/null 2>&1 || exit 0
missing=""
for lib in $libs; do
    state=$(dpkg-query --show --showformat='${db:Status-Status}' "$lib" 2>/dev/null)
    [ "$state" = installed ] || missing="$missing $lib"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && apt-get update -qq >&2 &&
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing >/dev/null; then
    echo "installed$missing"
else
    echo "mooncake needs$missing; to install: sudo apt-get install$missing" >&2
fi
